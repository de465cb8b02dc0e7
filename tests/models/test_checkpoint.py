import json
import os
import pickle
import shutil

import pytest
import torch
from fuzzing import refused
from official_layout import TINY, TINY_V2_LITE, write_official_checkpoint
from safetensors.torch import load_file, save_file

from moe_int8.models.deepseek.checkpoint import INDEX, Checkpoint, CheckpointError

PROJECTION = "model.layers.1.mlp.experts.0.up_proj"
INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*mlp\\.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    return folder, write_official_checkpoint(folder, TINY)


@pytest.fixture
def fp8(official, tmp_path):
    """A copy of the official checkpoint that a test may damage."""
    return shutil.copytree(official[0], tmp_path / "fp8")


def write(folder, tensors, quantization=None, **config):
    """A checkpoint in a single file, without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY | config | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def int8_tensors(N=4, K=8, scale_shape=(4, 1)):
    return {
        f"{PROJECTION}.weight": torch.ones(N, K, dtype=torch.int8),
        f"{PROJECTION}.weight_scale": torch.ones(scale_shape),
        "lm_head.weight": torch.ones(4, 8, dtype=torch.bfloat16),
    }


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_reads_names_shapes_dtypes_and_values_over_several_shards(official):
    folder, meant = official
    checkpoint = Checkpoint(folder)
    assert checkpoint.format == "fp8"
    assert checkpoint.block == (128, 128)
    assert len(checkpoint.files()) == 3
    assert {n for n in checkpoint.names() if not n.endswith("_scale_inv")} == set(meant)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert (checkpoint.shape(name), checkpoint.dtype(name)) == ((576, 160), torch.float8_e4m3fn)
    assert checkpoint.shape(f"{name}_scale_inv") == (5, 2)
    assert checkpoint.file_of(name) != checkpoint.file_of(f"{name}_scale_inv")
    assert torch.equal(checkpoint.tensor("lm_head.weight").float(), meant["lm_head.weight"])
    assert torch.equal(checkpoint.slice("lm_head.weight")[8:16, 4:].float(), meant["lm_head.weight"][8:16, 4:])
    assert checkpoint.is_quantized("model.layers.0.self_attn.kv_a_proj_with_mqa")
    assert not checkpoint.is_quantized("model.layers.1.mlp.gate")
    assert sorted(n for file in checkpoint.files() for n in checkpoint.names_in(file)) == checkpoint.names()


def test_c47_the_mtp_layer_is_read_like_any_other(official):
    checkpoint = Checkpoint(official[0])
    assert checkpoint.config["num_hidden_layers"] == 2
    assert checkpoint.shape("model.layers.2.eh_proj.weight") == (160, 320)


def test_reading_goes_on_after_close(official):
    checkpoint = Checkpoint(official[0])
    before = checkpoint.tensor("lm_head.weight")
    checkpoint.close()
    assert torch.equal(checkpoint.tensor("lm_head.weight"), before)


@pytest.mark.parametrize("scale_shape", [(4, 1), (4,)])
@pytest.mark.parametrize("quantization", [None, {"quant_method": "w8a8_int8"}, INT8_CONFIG], ids=["none", "w8a8", "ct"])
def test_c48a_channel_int8_is_recognized_however_config_names_it(tmp_path, quantization, scale_shape):
    checkpoint = Checkpoint(write(tmp_path, int8_tensors(scale_shape=scale_shape), quantization))
    assert checkpoint.format == "int8"
    assert checkpoint.is_quantized(PROJECTION)
    assert not checkpoint.is_quantized("lm_head")


@pytest.mark.parametrize("dtype, form", [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_c48c_unquantized_checkpoints_are_recognized(tmp_path, dtype, form):
    checkpoint = Checkpoint(write(tmp_path, {f"{PROJECTION}.weight": torch.ones(4, 8, dtype=dtype)}))
    assert checkpoint.format == form
    assert not checkpoint.is_quantized(PROJECTION)


def test_v2_lite_layout_is_bf16(tmp_path):
    write_official_checkpoint(tmp_path, TINY_V2_LITE, fp8=False)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.format == "bf16"
    assert checkpoint.shape("model.layers.0.self_attn.q_proj.weight") == (192, 160)
    assert not [name for name in checkpoint.names() if "e_score" in name or "q_a_proj" in name]


def test_ignore_entries_are_names_or_patterns_anchored_at_the_start(tmp_path):
    config = INT8_CONFIG | {"ignore": ["lm_head", "re:.*mlp\\.gate$", "model.layers.2"]}
    checkpoint = Checkpoint(write(tmp_path, int8_tensors(), config))
    assert checkpoint.is_ignored("lm_head")
    assert checkpoint.is_ignored("model.layers.1.mlp.gate")
    assert not checkpoint.is_ignored("model.layers.1.mlp.gate_proj")
    assert not checkpoint.is_ignored("model.lm_head")  # a name is not a suffix
    assert not checkpoint.is_ignored("model.layers.2.eh_proj")  # nor a prefix


def test_c45_a_missing_shard_is_named(fp8):
    (fp8 / "model-00002-of-000003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-000003.safetensors is missing"):
        Checkpoint(fp8)


@pytest.mark.parametrize("size", [0, 4, 1000, -1], ids=["empty", "no header", "half a header", "one byte short"])
def test_c45_a_truncated_shard_is_named(fp8, size):
    shard = fp8 / "model-00002-of-000003.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model-00002-of-000003.safetensors is truncated"):
        Checkpoint(fp8)


def edit_header(path, change):
    """Rewrite a shard with its header's text changed; the tensors' bytes stay."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + size])
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def set_entry(name, **fields):
    def change(header):
        document = json.loads(header)
        document[name] |= fields
        return json.dumps(document).encode()

    return change


def twice(name):
    def change(header):
        entry = json.dumps(json.loads(header)[name]).encode()
        return b'{"' + name.encode() + b'": ' + entry + b", " + header.lstrip()[1:]

    return change


def moved(name):
    def change(header):
        document = json.loads(header)
        document[name]["data_offsets"] = [offset + 2 for offset in document[name]["data_offsets"]]
        return json.dumps(document).encode()

    return change


HEAD = "lm_head.weight"  # [64, 160] bfloat16: 20,480 bytes
HEADERS = {
    "shape and offsets differ": (set_entry(HEAD, shape=[64, 161]), "is truncated or not a safetensors file"),
    "a product beyond 64 bits": (set_entry(HEAD, shape=[2**40, 2**40]), "is truncated or not a safetensors file"),
    "a tensor of 10^15 bytes": (
        set_entry(HEAD, shape=[10**15], dtype="I8", data_offsets=[0, 10**15]),
        "is truncated or not a safetensors file",
    ),
    "offsets behind the file": (set_entry(HEAD, data_offsets=[10**9, 10**9 + 20480]), "is truncated or not"),
    "offsets the wrong way": (set_entry(HEAD, data_offsets=[20480, 0]), "is truncated or not a safetensors file"),
    "a negative offset": (set_entry(HEAD, data_offsets=[-20480, 0]), "is truncated or not a safetensors file"),
    "two tensors on the same bytes": (moved(HEAD), "is truncated or not a safetensors file"),
    "the same name twice": (twice(HEAD), r"\(its header holds the key 'lm_head.weight' twice\)"),
    "NaN": (set_entry(HEAD, shape=[float("nan")]), r"\(its header holds NaN, which is not JSON\)"),
    "deeply nested": (lambda header: b'{"a": ' * 100_000, r"\(its header is nested too deeply\)"),
    "a list": (lambda header: b"[1, 2]  ", r"\(its header must hold a JSON object, got list\)"),
    "an entry that is a list": (
        lambda header: json.dumps(json.loads(header) | {"a": ["I8", [1], [0, 1]]}).encode(),
        "is truncated or not a safetensors file",
    ),
    "an unprintable name": (
        lambda header: header.replace(b'"lm_head.weight"', b'"\\u001b[2J"'),
        "its header holds the name .*, which is too long or cannot be printed",
    ),
    "an unknown dtype": (set_entry(HEAD, dtype="\x1b[2J" + "x" * 1000), "is truncated or not a safetensors file"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused_by_file(fp8, case):
    change, message = HEADERS[case]
    name = Checkpoint(fp8).file_of(HEAD)
    edit_header(fp8 / name, change)
    assert refused(lambda: Checkpoint(fp8))  # asserts that the message is one line, and that no memory was taken
    with pytest.raises(CheckpointError, match=f"{name} .*{message}|{name}: .*{message}"):
        Checkpoint(fp8)


@pytest.mark.parametrize("size", [(32 << 20) + 1, 10**8, 2**63, 2**64 - 1])
def test_the_size_of_a_header_is_bounded_before_it_is_read(fp8, size):
    shard = fp8 / "model-00002-of-000003.safetensors"
    with shard.open("r+b") as stream:
        stream.write(size.to_bytes(8, "little"))
        stream.truncate(2 << 30)  # sparse: the file is as large as it says
    assert refused(lambda: Checkpoint(fp8))
    with pytest.raises(CheckpointError, match=rf"{shard.name} is truncated .*\(its header claims {size} bytes\)"):
        Checkpoint(fp8)


def test_a_tensor_larger_than_any_models_is_refused_though_the_file_holds_it(tmp_path):
    write(tmp_path, int8_tensors())
    header = json.dumps({HEAD: {"dtype": "I8", "shape": [2**33 + 1], "data_offsets": [0, 2**33 + 1]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 2**33 + 1)  # sparse: takes no disk
    assert refused(lambda: Checkpoint(tmp_path))
    with pytest.raises(CheckpointError, match=f"model.safetensors: {HEAD} has {2**33 + 1} elements"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "x" * 300])
def test_an_index_with_names_that_cannot_be_printed_is_refused(fp8, name):
    edit(fp8 / INDEX, lambda index: index["weight_map"].update({name: "model-00001-of-000003.safetensors"}))
    assert refused(lambda: Checkpoint(fp8))
    with pytest.raises(CheckpointError, match=f"{INDEX} holds the name .* too long or cannot be printed"):
        Checkpoint(fp8)


def test_what_is_no_plain_file_is_not_opened(fp8):
    """A pipe would be waited for, for ever."""
    shard = fp8 / "model-00002-of-000003.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        Checkpoint(fp8)
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(CheckpointError, match=f"{shard.name}' cannot be opened"):
        Checkpoint(fp8)
    shard.unlink()
    shard.mkdir()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        Checkpoint(fp8)
    for name in (INDEX, "config.json"):
        (fp8 / name).unlink()
        os.mkfifo(fp8 / name)
        with pytest.raises(CheckpointError, match=f"{INDEX} is missing|has no config.json"):
            Checkpoint(fp8)


def test_a_shard_name_too_long_for_the_disk_is_refused(fp8):
    edit(fp8 / INDEX, lambda index: index["weight_map"].update({HEAD: "x" * 5000 + ".safetensors"}))
    assert refused(lambda: Checkpoint(fp8))


@pytest.mark.parametrize("block", [[128], [128, 0], [128, 10**12], "128", [128, 128, 128], [True, 128], {"a": 1}])
def test_blocks_of_absurd_size_are_refused(fp8, block):
    edit(fp8 / "config.json", lambda config: config["quantization_config"].update(weight_block_size=block))
    with pytest.raises(CheckpointError, match="weight_block_size must be two whole numbers from 1 to 1024"):
        Checkpoint(fp8)


def test_c54_files_split_for_a_number_of_ranks_are_named_as_such(fp8):
    (fp8 / INDEX).unlink()
    for rank, shard in enumerate(sorted(fp8.glob("*.safetensors"))):
        shard.rename(fp8 / f"model{rank}-mp3.safetensors")
    with pytest.raises(CheckpointError, match=r"was split for a number of ranks .* give the checkpoint as it was"):
        Checkpoint(fp8)


@pytest.mark.parametrize("name", ["../out.safetensors", "/tmp/out.safetensors", "a/b.safetensors", "a\0.safetensors"])
def test_shard_names_that_leave_the_folder_are_refused(fp8, name):
    (fp8.parent / "out.safetensors").write_bytes((fp8 / "model-00001-of-000003.safetensors").read_bytes())
    edit(fp8 / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": name}))
    with pytest.raises(CheckpointError, match="leaves the folder"):
        Checkpoint(fp8)


def test_links_out_of_the_folder_are_refused(fp8, tmp_path):
    shard = fp8 / "model-00001-of-000003.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"links to .*elsewhere.safetensors, out of the folder"):
        Checkpoint(fp8)


def test_the_links_of_the_hugging_face_cache_are_followed(fp8, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in fp8.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert Checkpoint(snapshot).format == "fp8"


def test_pickles_are_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    write(tmp_path, int8_tensors())
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated or not a safetensors file"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle files"):
        Checkpoint(tmp_path)
    index = {"weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'pytorch_model.bin': only .safetensors"):
        Checkpoint(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_a_tensor_that_the_index_promises_and_the_file_lacks_is_named(fp8):
    edit(fp8 / INDEX, lambda index: index["weight_map"].update({"a.weight": "model-00001-of-000003.safetensors"}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-000003.safetensors lacks the tensor a.weight"):
        Checkpoint(fp8)


def test_a_tensor_that_the_index_forgot_is_found_in_its_file(fp8):
    """Indexes of converted checkpoints that never list their scales exist."""
    edit(fp8 / INDEX, lambda index: index["weight_map"].pop(f"{PROJECTION}.weight_scale_inv"))
    assert Checkpoint(fp8).is_quantized(PROJECTION)


def test_the_index_decides_between_two_copies(fp8):
    first, second = (fp8 / f"model-0000{i}-of-000003.safetensors" for i in (1, 2))
    holder = Checkpoint(fp8).file_of("lm_head.weight")
    other = second if holder == first.name else first
    right = load_file(fp8 / holder)["lm_head.weight"]
    save_file(load_file(other) | {"lm_head.weight": right + 1}, other)
    assert torch.equal(Checkpoint(fp8).tensor("lm_head.weight"), right)


@pytest.mark.parametrize(
    "architecture, message",
    [
        (["DeepseekV32ForCausalLM"], "DeepseekV32ForCausalLM .*V3.2"),
        (["LlamaForCausalLM"], "'LlamaForCausalLM' is not supported"),
        (None, "None is not supported"),
        ([], "None is not supported"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path, architecture, message):
    write(tmp_path, int8_tensors(), architectures=architecture)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_missing_and_broken_json_is_named(fp8):
    (fp8 / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{INDEX} is no JSON"):
        Checkpoint(fp8)
    (fp8 / INDEX).write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(CheckpointError, match=rf"{INDEX}: weight_map must map"):
        Checkpoint(fp8)
    (fp8 / INDEX).unlink()
    with pytest.raises(CheckpointError, match=rf"{INDEX} is missing"):
        Checkpoint(fp8)
    (fp8 / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json"):
        Checkpoint(fp8)
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint(fp8 / "nowhere")


def broken(change):
    """INT8 tensors, changed."""
    tensors = int8_tensors()
    change(tensors)
    return tensors


WEIGHT, SCALE = f"{PROJECTION}.weight", f"{PROJECTION}.weight_scale"


@pytest.mark.parametrize(
    "tensors, quantization, message",
    [
        (broken(lambda t: t.pop(SCALE)), None, rf"model.safetensors: {WEIGHT} is INT8 without a {SCALE}"),
        ({"lm_head.weight": torch.ones(4, 8)}, INT8_CONFIG, "says INT8, but the files hold no INT8 weights"),
        (broken(lambda t: t.update({SCALE: torch.ones(3, 1)})), None, rf"{WEIGHT} is \[4, 8\] and its scale \[3, 1\]"),
        (broken(lambda t: t.update({SCALE: torch.ones(4, 2)})), None, "scale per output channel"),
        (broken(lambda t: t.update({f"{WEIGHT}_scale_inv": t.pop(SCALE)})), None, "blockwise_int8"),
        (int8_tensors(), {"quant_method": "blockwise_int8"}, "'blockwise_int8' .* not supported"),
        (int8_tensors(), {"quant_method": "gptq"}, "'gptq' .* not supported"),
        (int8_tensors(), {"quant_method": "fp8"}, "'fp8' .* not supported; supported are fp8 in blocks"),
        (int8_tensors(), INT8_CONFIG | {"format": "pack-quantized"}, "'pack-quantized'"),
        (int8_tensors(), INT8_CONFIG | {"config_groups": {"group_0": {}}}, "'int-quantized'"),
        (int8_tensors(), INT8_CONFIG | {"ignore": [PROJECTION]}, f"{WEIGHT} is INT8, though .* under ignore"),
        (int8_tensors(), INT8_CONFIG | {"ignore": ["re:("]}, r"ignore entry 're:\('"),
        (int8_tensors(), INT8_CONFIG | {"ignore": 5}, "ignore must be a list of names, got 5"),
        (broken(lambda t: t.update({SCALE: torch.ones(4, 1, dtype=torch.int64)})), None, "its scale .* torch.int64"),
        (broken(lambda t: t.update({SCALE: torch.ones(4, 1).half()})), None, r"its scale \[4, 1\] torch.float16"),
        (broken(lambda t: t.update({SCALE: torch.ones(4, 1).double()})), None, r"its scale \[4, 1\] torch.float64"),
        (
            int8_tensors(),
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            f"model.safetensors: {WEIGHT} is INT8, though config.json says FP8: .* get both from one place",
        ),
        (
            {WEIGHT: torch.ones(4, 8).to(torch.float8_e4m3fn), f"{WEIGHT}_scale_inv": torch.ones(1, 1)},
            INT8_CONFIG,
            f"model.safetensors: {WEIGHT} is FP8, though config.json says INT8: .* get both from one place",
        ),
        (
            {"lm_head.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), WEIGHT: torch.ones(4, 8)},
            None,
            "model.safetensors: lm_head.weight is FP8 without a lm_head.weight_scale_inv",
        ),
        (
            broken(lambda t: t.update({"model.norm.weight": torch.ones(8, dtype=torch.int8)})),
            None,
            "model.safetensors: model.norm.weight is INT8 without a model.norm.weight_scale",
        ),
        ({WEIGHT: torch.ones(4, 8).half()}, None, f"{WEIGHT} is stored as torch.float16"),
        ({WEIGHT: torch.ones(4, 8).to(torch.float8_e4m3fn)}, None, f"{WEIGHT} is FP8 without a {WEIGHT}_scale_inv"),
        (
            {WEIGHT: torch.ones(4, 8).to(torch.float8_e4m3fn), f"{WEIGHT}_scale_inv": torch.ones(2, 1)},
            None,
            r"is \[4, 8\] and its weight_scale_inv torch.float32 \[2, 1\]",
        ),
        (
            {WEIGHT: torch.ones(4, 8), f"{WEIGHT}_scale_inv": torch.ones(1, 1)},
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "config.json says FP8, but the files hold no FP8 weights",
        ),
        ({WEIGHT: torch.ones(4, 8).to(torch.float8_e5m2)}, None, f"{WEIGHT} has the unsupported dtype F8_E5M2"),
    ],
)
def test_c48_what_cannot_be_read_is_named_and_never_a_key_error(tmp_path, tensors, quantization, message):
    write(tmp_path, tensors, quantization)
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint(tmp_path)
    assert "\n" not in str(error.value)


def test_the_scale_of_no_weight_is_named(fp8):
    shard = fp8 / "model-00001-of-000003.safetensors"
    save_file(load_file(shard) | {"model.layers.9.weight_scale_inv": torch.ones(1, 1)}, shard)
    with pytest.raises(CheckpointError, match=r"model.layers.9.weight_scale_inv is the scale of no FP8 weight"):
        Checkpoint(fp8)


def test_an_unknown_tensor_is_no_key_error(official):
    for read in (Checkpoint(official[0]).tensor, Checkpoint(official[0]).slice, Checkpoint(official[0]).shape):
        with pytest.raises(CheckpointError, match=r"no file holds the tensor nothing.weight"):
            read("nothing.weight")
