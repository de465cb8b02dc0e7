"""Loading: every format that is read, what is refused and how, and that a rank reads its own part and no more."""

import gc
import json
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from official_layout import TINY, write_official_checkpoint
from safetensors.torch import load_file, save_file
from tiny import V3, Driver, edit_config, make_reference, quantized_copy, random_tokens, save, whole_logits

from moe_int8.models.deepseek import weights
from moe_int8.models.deepseek.checkpoint import Checkpoint, CheckpointError
from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.weights import load_model, open_model
from moe_int8.parallel import Group, Groups
from moe_int8.quantize import dequantize, quantize_per_channel

ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.1.mlp.experts"
CHANNEL_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model of two layers as fp32, as int8, and with the int8 values in fp32."""
    base = tmp_path_factory.mktemp("weights")
    save(make_reference(V3 | {"num_hidden_layers": 2}), base / "fp32")
    quantized_copy(base / "fp32", base / "int8", base / "dequantized")
    return base


def changed(source: Path, folder: Path, change, **config) -> Path:
    """A copy of a checkpoint whose tensors went through `change(tensors)`."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    edit_config(folder, **config)
    return folder


def quiet(line: str) -> None:
    pass


def parameters_of(model: DeepseekModel) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def assert_same_parameters(model: DeepseekModel, other: DeepseekModel) -> None:
    first, second = parameters_of(model), parameters_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


# formats


def test_c48a_int8_loads_its_codes_and_scales(folders):
    model = load_model(folders / "int8", say=lambda line: pytest.fail(line))
    stored = load_file(folders / "int8" / "model.safetensors")
    layer = model.layers[1]
    assert torch.equal(layer.self_attn.o_proj.weight, stored["model.layers.1.self_attn.o_proj.weight"])
    for expert in range(8):
        for part, rows in (("gate_proj", slice(0, 32)), ("up_proj", slice(32, 64))):
            name = f"{EXPERTS}.{expert}.{part}.weight"
            assert torch.equal(layer.mlp.experts.w13[expert, rows], stored[name])
            assert torch.equal(layer.mlp.experts.w13_scale[expert, rows], stored[f"{name}_scale"].flatten())
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert layer.mlp.gate.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [False, True])
def test_scales_may_be_n_or_n_by_1_in_fp32_or_bf16(folders, tmp_path, dtype, flat):
    def change(tensors):
        for name, tensor in tensors.items():
            if name.endswith("_scale"):
                tensors[name] = tensor.to(dtype).flatten() if flat else tensor.to(dtype)

    model = load_model(changed(folders / "int8", tmp_path / "scales", change))
    expected = load_model(folders / "int8")
    for name, parameter in parameters_of(expected).items():
        if name.endswith("_scale"):
            parameter.copy_(parameter.to(dtype))
        elif name.endswith("kv_b_proj.weight"):  # dequantized at load, with the rounded scale
            layer = name.split(".")[1]
            stored = load_file(folders / "int8" / "model.safetensors")
            codes = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
            scale = stored[f"{codes}_scale"].to(dtype).float()
            parameter.copy_(dequantize(stored[codes], scale, torch.bfloat16))
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_int8_is_dequantized_when_asked_for(folders, name, dtype):
    model = load_model(folders / "int8", dtype=name)
    assert {parameter.dtype for parameter in model.parameters()} <= {dtype, torch.float32}
    values = load_file(folders / "dequantized" / "model.safetensors")
    assert torch.equal(model.layers[0].self_attn.o_proj.weight, values[f"{ATTENTION}.o_proj.weight"].to(dtype))
    assert torch.equal(model.layers[1].mlp.experts.w2[3], values[f"{EXPERTS}.3.down_proj.weight"].to(dtype))


def test_fp32_runs_as_it_is_unless_another_dtype_is_asked_for(folders):
    lines: list[str] = []
    assert load_model(folders / "fp32", say=lines.append).layers[0].self_attn.o_proj.weight.dtype == torch.float32
    model = load_model(folders / "fp32", dtype="bf16", say=lines.append)
    assert model.layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16
    assert lines == []


def test_c48b_fp8_says_how_to_convert_it(tmp_path):
    folder = tmp_path / "R1"
    write_official_checkpoint(folder, TINY)
    for dtype in ("auto", "int8", "bf16"):
        with pytest.raises(CheckpointError, match=rf"FP8 checkpoint.*python scripts/convert.py {folder} {folder}-INT8"):
            load_model(folder, dtype=dtype)


def test_c49_bf16_becomes_int8_only_by_name_and_says_so(tmp_path):
    write_official_checkpoint(tmp_path, TINY | {"num_nextn_predict_layers": 0}, fp8=False)
    lines: list[str] = []
    assert load_model(tmp_path, say=lines.append).layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16
    assert lines == []
    assert load_model(tmp_path, dtype="int8", say=lines.append).layers[0].self_attn.o_proj.weight.dtype == torch.int8
    assert lines == [f"quantising the bf16 weights of {tmp_path} to int8 while loading"]


def test_c49_a_config_that_promises_int8_without_scales_is_refused(folders):
    folder = folders / "promised"
    changed(folders / "fp32", folder, lambda tensors: None, quantization_config={"quant_method": "w8a8_int8"})
    with pytest.raises(CheckpointError, match="says INT8, but the files hold no INT8 weights"):
        load_model(folder)


def test_unknown_arguments_are_refused(folders):
    with pytest.raises(ValueError, match=r"dtype must be .* got 'int4'"):
        open_model(folders / "int8", dtype="int4")
    with pytest.raises(ValueError, match=r"accumulator must be .* got 'int64'"):
        open_model(folders / "int8", accumulator="int64")


# quantising while loading, and converting first


@pytest.mark.parametrize("size", [1, 2])
def test_quantizing_while_loading_equals_converting_first(tmp_path, size):
    """Also on a rank: a row-parallel slice has the scale of its whole row."""
    write_official_checkpoint(tmp_path / "bf16", TINY, fp8=False)
    convert(tmp_path / "bf16", tmp_path / "int8", Settings())
    for rank in range(size):
        groups = Groups(tp=Group(rank, size))
        at_once = load_model(tmp_path / "bf16", groups, dtype="int8", say=quiet)
        converted = load_model(tmp_path / "int8", groups, say=quiet)
        for name, parameter in parameters_of(converted).items():
            if name.endswith("kv_b_proj.weight"):  # dequantized from int8 there, never int8 here
                parameters_of(at_once)[name].copy_(parameter)
        assert_same_parameters(at_once, converted)


def test_an_fp8_checkpoint_converted_and_loaded_holds_its_values(tmp_path):
    meant = write_official_checkpoint(tmp_path / "fp8", TINY)
    convert(tmp_path / "fp8", tmp_path / "int8", Settings())
    model = load_model(tmp_path / "int8", dtype="fp32", say=quiet)
    experts = model.layers[1].mlp.experts
    pairs = {
        "model.layers.0.self_attn.q_a_proj.weight": model.layers[0].self_attn.q_a_proj.weight,
        "model.layers.1.self_attn.kv_b_proj.weight": model.layers[1].self_attn.kv_b_proj.weight,
        "model.layers.1.mlp.experts.2.up_proj.weight": experts.w13[2, 64:],
        "model.layers.1.mlp.experts.2.down_proj.weight": experts.w2[2],
    }
    for name, parameter in pairs.items():
        half_step = quantize_per_channel(meant[name])[1] / 2
        assert ((parameter - meant[name]).abs() <= half_step * 1.001).all(), name
    logits = whole_logits(model, [1, 2, 3])
    assert logits.isfinite().all()


# what the files hold


def test_c45_a_missing_shard_is_found_before_anything_is_built(tmp_path, monkeypatch):
    write_official_checkpoint(tmp_path, TINY, fp8=False, shards=2)
    (tmp_path / "model-00002-of-000002.safetensors").unlink()
    monkeypatch.setattr(weights, "DeepseekModel", lambda *arguments: pytest.fail("a model was built"))
    with pytest.raises(CheckpointError, match=r"model-00002-of-000002\.safetensors is missing"):
        load_model(tmp_path)


def test_c47_the_mtp_layer_is_skipped_with_one_line(tmp_path):
    write_official_checkpoint(tmp_path, TINY, fp8=False)
    lines: list[str] = []
    model = load_model(tmp_path, say=lines.append)
    assert len(model.layers) == 2
    count = sum(name.startswith("model.layers.2.") for name in Checkpoint(tmp_path).names())
    assert lines == [f"skipping layer 2 (multi-token prediction): {count} tensors"]
    tokens = [3, 1, 4]
    assert Driver(model).logits([tokens], [range(3)]).isfinite().all()


def test_a_layer_beyond_the_mtp_layer_is_unknown(tmp_path):
    write_official_checkpoint(tmp_path, TINY | {"num_nextn_predict_layers": 2}, fp8=False)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(
        CheckpointError, match=r"the files hold model\.layers\.3\..* and \d+ more, which this model does"
    ):
        load_model(tmp_path, say=quiet)


def test_c49_parameters_that_no_file_fills_are_listed(folders, tmp_path):
    def change(tensors):
        del tensors[f"{ATTENTION}.o_proj.weight"], tensors[f"{ATTENTION}.o_proj.weight_scale"]

    with pytest.raises(
        CheckpointError, match=rf"no file holds {ATTENTION}\.o_proj\.weight; the checkpoint is incomplete"
    ):
        load_model(changed(folders / "int8", tmp_path / "one", change))

    def change_all(tensors):
        for name in [name for name in tensors if "experts.3." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=rf"no file holds {EXPERTS}\.3\.down_proj\.weight, "):
        load_model(changed(folders / "fp32", tmp_path / "expert", change_all))

    def change_most(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r" and 21 more; "):
        load_model(changed(folders / "fp32", tmp_path / "experts", change_most))


def test_a_missing_correction_bias_is_named(folders, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]

    with pytest.raises(CheckpointError, match=r"no file holds model\.layers\.1\.mlp\.gate\.e_score_correction_bias"):
        load_model(changed(folders / "fp32", tmp_path / "bias", change))


@pytest.mark.parametrize(
    "name, source",
    [
        (f"{ATTENTION}.sinks", "fp32"),
        (f"{ATTENTION}.q_proj.weight", "fp32"),
        (f"{ATTENTION}.o_proj.bias", "int8"),
        (f"{ATTENTION}.o_proj.weight_zero_point", "int8"),
        (f"{ATTENTION}.o_proj.weight_scale", "fp32"),  # the scale of a weight that is not int8
        ("model.norm.weight_scale", "fp32"),
        (f"{EXPERTS}.8.up_proj.weight", "fp32"),
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_named(folders, tmp_path, name, source):
    folder = changed(folders / source, tmp_path / "more", lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=f"the files hold {name}, which this model does not have"):
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", [f"{ATTENTION}.o_proj", f"{ATTENTION}.kv_b_proj", f"{EXPERTS}.5.down_proj", f"{EXPERTS}.5.up_proj"]
)
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_c49_a_scale_that_is_not_finite_is_named_with_its_file(folders, tmp_path, name, value, dtype):
    def change(tensors):
        tensors[f"{name}.weight_scale"][1] = value

    folder = changed(folders / "int8", tmp_path / "broken", change)
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: .*{name}\.weight_scale has values that are not finite"
    ):
        load_model(folder, dtype=dtype)


@pytest.mark.parametrize("name", [f"{ATTENTION}.o_proj", f"{ATTENTION}.kv_b_proj", f"{EXPERTS}.5.down_proj"])
@pytest.mark.parametrize(
    "value, message", [(-0.01, "has negative values"), (0.0, "is 0 for a row whose codes are not")]
)
def test_c49_a_scale_that_cannot_be_right_is_named_with_its_file(folders, tmp_path, name, value, message):
    def change(tensors):
        tensors[f"{name}.weight_scale"][1] = value

    folder = changed(folders / "int8", tmp_path / "broken", change)
    for dtype in ("int8", "bf16"):
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{name}\.weight_scale {message}"):
            load_model(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_c49_a_scale_of_0_is_right_for_a_row_of_zeros(folders, tmp_path, dtype):
    """Converters that do not bound the scale from below write it; ours writes 1e-10 / 127."""

    def change(tensors):
        for name in (f"{ATTENTION}.o_proj", f"{EXPERTS}.5.down_proj"):
            tensors[f"{name}.weight_scale"][1] = 0
            tensors[f"{name}.weight"][1] = 0

    model = load_model(changed(folders / "int8", tmp_path / "zero", change), dtype=dtype)
    assert whole_logits(model, random_tokens(5)).isfinite().all()
    assert not model.layers[1].mlp.experts.w2[5, 1].any()


@pytest.mark.parametrize("name", [f"{ATTENTION}.o_proj.weight", f"{EXPERTS}.5.up_proj.weight"])
def test_a_weight_that_is_not_finite_is_not_quantized(folders, tmp_path, name):
    def change(tensors):
        tensors[name][1, 2] = float("nan")

    folder = changed(folders / "fp32", tmp_path / "broken", change)
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: {name}: the weight has values that are not finite"
    ):
        load_model(folder, dtype="int8", say=quiet)


def test_a_correction_bias_that_is_not_finite_is_named(folders, tmp_path):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"

    def change(tensors):
        tensors[name][0] = float("nan")

    with pytest.raises(CheckpointError, match=rf"{name}: .*not finite"):
        load_model(changed(folders / "fp32", tmp_path / "broken", change))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.mlp.gate.weight",
        f"{ATTENTION}.q_b_proj.weight",
        f"{ATTENTION}.o_proj.weight",
        f"{EXPERTS}.2.gate_proj.weight",
        f"{EXPERTS}.2.down_proj.weight",
    ],
)
def test_a_shape_that_does_not_fit_is_named(folders, tmp_path, name):
    def change(tensors):
        tensors[name] = torch.zeros([*tensors[name].shape[:-1], tensors[name].shape[-1] + 1])

    needed = list(load_file(folders / "fp32" / "model.safetensors")[name].shape)
    held = [*needed[:-1], needed[-1] + 1]
    message = f"model.safetensors: {name}: the file holds shape {held}, the model needs {needed}"
    with pytest.raises(CheckpointError) as caught:
        load_model(changed(folders / "fp32", tmp_path / "shape", change))
    assert message in str(caught.value)


# modules that an INT8 checkpoint leaves alone


def test_modules_of_the_ignore_list_load_as_bf16_and_the_rest_as_int8(folders, tmp_path):
    ignored = [f"{ATTENTION}.o_proj", "re:model.layers.1.mlp.experts.*"]
    values = load_file(folders / "fp32" / "model.safetensors")

    def change(tensors):
        for name in list(tensors):
            module = name.removesuffix(".weight")
            if projection_kind(name) and (module == ignored[0] or ".experts." in name):
                tensors[name] = values[name].bfloat16()
                del tensors[f"{name}_scale"]

    quantization = CHANNEL_INT8 | {"ignore": [*ignored, "lm_head"]}
    model = load_model(changed(folders / "int8", tmp_path / "mixed", change, quantization_config=quantization))
    first, second = model.layers
    assert first.self_attn.o_proj.weight.dtype == torch.bfloat16
    assert torch.equal(first.self_attn.o_proj.weight, values[f"{ATTENTION}.o_proj.weight"].bfloat16())
    assert second.mlp.experts.w13.dtype == torch.bfloat16
    assert not hasattr(second.mlp.experts, "w13_scale")
    assert second.self_attn.o_proj.weight.dtype == torch.int8
    assert second.mlp.shared_experts.down_proj.weight.dtype == torch.int8
    assert whole_logits(model, random_tokens(5)).isfinite().all()


@pytest.mark.parametrize("name", [f"{EXPERTS}.3.up_proj.weight", f"{ATTENTION}.o_proj.weight"])
def test_c49_an_unquantized_projection_among_int8_ones_is_named(folders, tmp_path, name):
    def change(tensors):
        tensors[name] = tensors[name].bfloat16()
        del tensors[f"{name}_scale"]

    with pytest.raises(CheckpointError, match=rf"{name} is torch.bfloat16 in an INT8 checkpoint .* under ignore"):
        load_model(changed(folders / "int8", tmp_path / "mixed", change))


# what a rank reads


class CountingSlice:
    def __init__(self, part, log: list[int]) -> None:
        self.part, self.log = part, log

    def __getitem__(self, index) -> torch.Tensor:
        tensor = self.part[index]
        self.log.append(tensor.nbytes)
        return tensor


@pytest.mark.parametrize("source", ["fp32", "int8"])
def test_a_rank_of_four_reads_its_own_part_and_no_more(folders, monkeypatch, source):
    log: list[int] = []
    original = Checkpoint.slice
    monkeypatch.setattr(Checkpoint, "slice", lambda self, name: CountingSlice(original(self, name), log))
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: pytest.fail(f"{name} was read whole"))
    for rank in range(4):
        log.clear()
        model = load_model(folders / source, Groups(tp=Group(rank, 4)), activation_dtype=torch.float32)
        needed = model.weight_bytes()
        for part in (model.embed_tokens, model.lm_head):  # 101 rows: three ranks hold 26, the last 23 and padding
            needed -= (part.part - (part.stop - part.start)) * part.weight.shape[1] * 4
        if source == "int8":  # held in fp32, stored as int8 with a scale a row
            for layer in model.layers:
                rows, columns = layer.self_attn.kv_b_proj.weight.shape
                needed -= rows * columns * 4 - rows * (columns + 4)
        assert sum(log) == needed
    whole = (folders / source / "model.safetensors").stat().st_size
    assert needed < 0.45 * whole


def test_the_ranks_hold_together_what_one_holds(folders):
    whole = load_model(folders / "int8").layers[1]
    parts = [load_model(folders / "int8", Groups(tp=Group(rank, 2))).layers[1] for rank in range(2)]
    experts = [part.mlp.experts for part in parts]
    gates = torch.cat([e.w13[:, :16] for e in experts], dim=1)
    ups = torch.cat([e.w13[:, 16:] for e in experts], dim=1)
    assert torch.equal(torch.cat((gates, ups), dim=1), whole.mlp.experts.w13)
    assert torch.equal(torch.cat([e.w2 for e in experts], dim=2), whole.mlp.experts.w2)
    for expert in experts:
        assert torch.equal(expert.w2_scale, whole.mlp.experts.w2_scale)
    q_b = [part.self_attn.q_b_proj for part in parts]
    assert torch.equal(torch.cat([q.weight for q in q_b]), whole.self_attn.q_b_proj.weight)
    assert torch.equal(torch.cat([q.weight_scale for q in q_b]), whole.self_attn.q_b_proj.weight_scale)


def test_a_size_that_does_not_divide_is_refused_before_loading(folders):
    with pytest.raises(
        ValueError, match="tensor-parallel size 3 does not divide num_attention_heads = 4; use one of 1, 2, 4"
    ):
        load_model(folders / "int8", Groups(tp=Group(0, 3)))


def test_the_index_of_several_shards_is_followed(folders, tmp_path):
    tensors = load_file(folders / "int8" / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):  # neighbors lie in different files, and so do weights and scales
        file = f"part-{i}.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text((folders / "int8" / "config.json").read_text())
    assert_same_parameters(load_model(tmp_path), load_model(folders / "int8"))


def test_c54_one_checkpoint_loads_at_every_size_without_being_prepared(folders):
    for size in (1, 2, 4):
        ranks = [load_model(folders / "int8", Groups(tp=Group(rank, size))) for rank in range(size)]
        assert sum(rank.layers[1].self_attn.o_proj.weight.shape[1] for rank in ranks) == 4 * 20  # heads * v_head_dim
        whole = torch.cat([rank.layers[1].self_attn.o_proj.weight for rank in ranks], dim=1)
        assert torch.equal(
            whole, load_file(folders / "int8" / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
        )


class RecordingBar:
    """In place of a bar."""

    bars: ClassVar[list["RecordingBar"]] = []

    def __init__(self, **options):
        self.options, self.done = options, 0
        self.bars.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, size):
        self.done += size


def test_progress_is_in_bytes_and_only_on_rank_0(folders, monkeypatch):
    monkeypatch.setattr(weights, "progress_bar", RecordingBar)
    monkeypatch.setattr(RecordingBar, "bars", [])
    for rank in (0, 1):
        load_model(folders / "int8", Groups(tp=Group(rank, 2)))
    stored = load_file(folders / "int8" / "model.safetensors")
    size = sum(tensor.nbytes for name, tensor in stored.items() if not name.endswith("_scale"))
    for bar in RecordingBar.bars:
        assert (bar.options["total"], bar.options["unit"], bar.done) == (size, "B", size)
    assert [bar.options["disable"] for bar in RecordingBar.bars] == [False, True]


def test_no_file_stays_mapped_and_few_are_at_a_time(tmp_path):
    """Mapped whole, R1's files would take 1.3 GB of page tables in every process."""
    write_official_checkpoint(tmp_path, TINY, fp8=False, shards=6)
    files = open_model(tmp_path)
    mapped: set[int] = set()
    slice_of = files.checkpoint.slice

    def spy(name):
        mapped.add(len(files.checkpoint._handles))
        return slice_of(name)

    files.checkpoint.slice = spy
    load_model(files, say=quiet)
    assert files.checkpoint._handles == {}
    assert max(mapped) <= 1  # these weights have no scales in other files


def test_after_an_error_the_rest_is_not_read(folders, tmp_path, monkeypatch):
    def change(tensors):
        tensors["model.layers.0.mlp.down_proj.weight_scale"][0] = float("nan")

    folder = changed(folders / "int8", tmp_path / "broken", change)
    read: list[str] = []

    class Spy(weights.CheckpointWeight):
        def __init__(self, checkpoint, name, quantize):
            read.append(name)
            super().__init__(checkpoint, name, quantize)

    monkeypatch.setattr(weights, "CheckpointWeight", Spy)
    monkeypatch.setattr(weights, "LOAD_THREADS", 1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj\.weight_scale has values"):
        load_model(folder)
    assert read[-1] == "model.layers.0.mlp.down_proj.weight"


def test_c53_loading_holds_no_shards_beside_the_weights(tmp_path):
    """8 shards of 13 MB, of which rank 0 of 4 keeps 26 MB; four shards more are allowed, as for the converter."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 8, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 8, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    write_official_checkpoint(tmp_path, TINY | sizes | layers, fp8=False, shards=8)
    shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))

    def taken() -> int:  # mapped files are the kernel's to drop, and do not count
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

    gc.collect()
    peak = before = taken()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, taken())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(tmp_path, Groups(tp=Group(0, 4)), say=quiet)
    ended.set()
    watcher.join()
    assert model.weight_bytes() > 1.5 * shard  # else the bound would say nothing
    assert peak - before < model.weight_bytes() + 4 * shard
