import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from official_layout import TINY, TINY_V2_LITE, write_official_checkpoint
from ranks import load_script
from safetensors.torch import load_file, save_file

from moe_int8.dispatch import INTERPRETED
from moe_int8.models.deepseek import convert as converter
from moe_int8.models.deepseek import output, shards
from moe_int8.models.deepseek.checkpoint import INDEX, Checkpoint, CheckpointError
from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.output import STATE
from moe_int8.models.deepseek.shards import for_each_shard
from moe_int8.models.deepseek.verify import CARRIED, Errors, verify
from moe_int8.quantization.block_fp8 import FP8, quantize_block_fp8
from moe_int8.quantize import quantize_per_channel

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the converter takes the CPU path; interpreted it takes minutes")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "convert.py"
ROW = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    return folder, write_official_checkpoint(folder, TINY)


@pytest.fixture(scope="module")
def converted(official, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted")
    convert(official[0], out, Settings())
    return out


@pytest.fixture
def fp8(official, tmp_path):
    """A copy of the official checkpoint that a test may damage."""
    return shutil.copytree(official[0], tmp_path / "fp8")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """8 shards of 32 MB, each with 32 expert weights."""
    folder = tmp_path_factory.mktemp("large")
    config = TINY | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    index = {}
    for layer in range(8):
        shard = {}
        for e in range(32):
            name = f"model.layers.{layer}.mlp.experts.{e}.gate_proj.weight"
            shard[name] = torch.randint(0, 127, (1024, 1024), dtype=torch.uint8).view(FP8)  # 127 would be NaN
            shard[f"{name}_scale_inv"] = torch.rand(8, 8)
        save_file(shard, folder / f"{layer}.safetensors")
        index |= dict.fromkeys(shard, f"{layer}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    yield folder
    shutil.rmtree(folder)


def single(folder, tensors, **config):
    """A checkpoint in a single file, without an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_script(*argv, **kwargs):
    command = [sys.executable, str(SCRIPT), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def test_c29_a_row_of_two_blocks_gets_one_scale(tmp_path):
    tensors = {ROW: torch.ones(1, 256).to(FP8), f"{ROW}_scale_inv": torch.tensor([[1.0, 0.25]])}
    convert(single(tmp_path / "fp8", tensors), tmp_path / "int8", Settings())
    result = load_file(tmp_path / "int8" / "model.safetensors")
    assert result[ROW].tolist() == [[127] * 128 + [32] * 128]  # 0.25 * 127 = 31.75
    torch.testing.assert_close(result[f"{ROW}_scale"], torch.tensor([[1 / 127]]), rtol=1e-7, atol=0)


@pytest.mark.parametrize("style", converter.CONFIG_STYLES)
def test_c29_no_block_size_is_left_in_any_config(official, tmp_path, style):
    convert(official[0], tmp_path / "out", Settings(config_style=style))
    assert b"block" not in (tmp_path / "out" / "config.json").read_bytes()
    assert not any(name.endswith("scale_inv") for name in Checkpoint(tmp_path / "out").names())


def test_c30_fp8_goes_to_int8_without_bf16_in_between(tmp_path):
    codes = torch.zeros(1, 256)
    codes[0, 0], codes[0, 128] = 448.0, 1.0
    tensors = {ROW: codes.to(FP8), f"{ROW}_scale_inv": torch.tensor([[1 / 448, 0.0827559]])}
    convert(single(tmp_path / "fp8", tensors), tmp_path / "int8", Settings())
    result = load_file(tmp_path / "int8" / "model.safetensors")[ROW]
    assert result[0, [0, 128]].tolist() == [127, 11]  # 10.51 steps; rounded to bf16 first, 10.48


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 20))
def test_c31_each_weight_is_within_half_a_step_and_each_row_uses_all_codes(tmp_path_factory, seed, exponent):
    tmp_path = tmp_path_factory.mktemp("c31")
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    w[7] = 0
    weight, scale_inv = quantize_block_fp8(w)
    source = single(tmp_path / "fp8", {ROW: weight, f"{ROW}_scale_inv": scale_inv})
    convert(source, tmp_path / "int8", Settings())
    result = load_file(tmp_path / "int8" / "model.safetensors")
    q, scale = result[ROW], result[f"{ROW}_scale"]
    meant = weight.float() * scale_inv.repeat_interleave(128, 1)[:1]
    assert ((q.float() * scale - meant).abs() <= scale / 2 * 1.001).all()
    largest = q.int().abs().amax(1)
    assert largest[7] == 0
    assert (largest[torch.arange(64) != 7] == 127).all()
    assert q.min() >= -127


def test_c46_weights_and_scales_in_different_shards_are_joined(official, converted):
    folder, meant = official
    source, result = Checkpoint(folder), Checkpoint(converted)
    projections = [name for name in meant if projection_kind(name)]
    orders = {source.file_of(name) < source.file_of(f"{name}_scale_inv") for name in projections}
    assert orders == {True, False}
    for name in projections:
        q, scale = quantize_per_channel(meant[name])
        assert torch.equal(result.tensor(name), q), name
        assert torch.equal(result.tensor(f"{name}_scale"), scale), name
        assert result.dtype(f"{name}_scale") is torch.float32


def test_c47_c52_all_else_is_carried_over_bit_for_bit(official, converted):
    folder, meant = official
    source, result = Checkpoint(folder), Checkpoint(converted)
    carried = [name for name in meant if not projection_kind(name)]
    assert set(result.names()) == {
        *meant,
        *(f"{name}_scale" for name in meant if projection_kind(name)),
    }
    for name in carried:
        assert result.dtype(name) is source.dtype(name)
        assert torch.equal(result.tensor(name), source.tensor(name)), name
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert result.dtype(bias) is torch.float32
    for kept in ("model.layers.1.mlp.gate.weight", "model.layers.2.eh_proj.weight", "lm_head.weight", bias):
        assert kept in carried
    for quantized in (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.2.mlp.experts.0.down_proj.weight",  # the MTP layer
    ):
        assert result.dtype(quantized) is torch.int8


def test_result_is_a_channel_int8_checkpoint_with_index_config_and_tokenizer(official, converted):
    checkpoint = Checkpoint(converted)
    assert checkpoint.format == "int8"
    original = Checkpoint(official[0]).config
    quantization = checkpoint.config["quantization_config"]
    assert quantization["ignore"] == [
        "lm_head",
        "model.layers.1.mlp.gate",
        "model.layers.2.eh_proj",
        "model.layers.2.mlp.gate",
        "model.layers.2.shared_head.head",
    ]
    assert {k: v for k, v in checkpoint.config.items() if k != "quantization_config"} == {
        k: v for k, v in original.items() if k not in ("quantization_config", "auto_map")
    }
    index = json.loads((converted / INDEX).read_text())
    stored = {name: t for file in checkpoint.files() for name, t in load_file(converted / file).items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert set(index["weight_map"]) == set(stored)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (converted / name).read_bytes() == (official[0] / name).read_bytes()
    assert not list(converted.glob("*.py"))
    assert not list(converted.glob(".*"))


def test_config_style_w8a8_int8(official, tmp_path):
    convert(official[0], tmp_path / "out", Settings(config_style="w8a8_int8"))
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.config["quantization_config"]["quant_method"] == "w8a8_int8"
    assert checkpoint.format == "int8"


def test_fp8_to_bf16_rounds_once_and_leaves_no_quantization(official, tmp_path):
    folder, meant = official
    convert(folder, tmp_path / "out", Settings(to="bf16"))
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.format == "bf16"
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.names() == sorted(meant)
    for name, w in meant.items():
        right = w if name.endswith("bias") else w.bfloat16()
        assert torch.equal(checkpoint.tensor(name), right), name


def test_bf16_v2_lite_to_int8(tmp_path):
    meant = write_official_checkpoint(tmp_path / "bf16", TINY_V2_LITE, fp8=False)
    convert(tmp_path / "bf16", tmp_path / "out", Settings())
    result = Checkpoint(tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    q, scale = quantize_per_channel(meant[name])
    assert torch.equal(result.tensor(name), q)
    assert torch.equal(result.tensor(f"{name}_scale"), scale)
    assert result.dtype("model.layers.1.mlp.gate.weight") is torch.bfloat16


def test_fp8_that_int8_leaves_alone_becomes_bf16(tmp_path):
    name = "model.layers.2.eh_proj.weight"
    weight, scale = quantize_block_fp8(torch.randn(130, 200))
    projection, projection_scale = quantize_block_fp8(torch.randn(4, 8))
    tensors = {name: weight, f"{name}_scale_inv": scale, ROW: projection, f"{ROW}_scale_inv": projection_scale}
    convert(single(tmp_path / "fp8", tensors), tmp_path / "out", Settings())
    result = load_file(tmp_path / "out" / "model.safetensors")
    meant = weight.float() * scale.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    assert torch.equal(result[name], meant.bfloat16())
    errors = verify(tmp_path / "fp8", tmp_path / "out")
    assert errors["to bf16"].tensors == 1
    assert 0 < errors["to bf16"].largest <= errors["to bf16"].bound


def test_odd_sizes_and_scalars_are_stored_right(tmp_path):
    tensors = {
        ROW: torch.randn(3, 7),
        "model.norm.weight": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    convert(single(tmp_path / "fp32", tensors), tmp_path / "out", Settings())
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(result[ROW], quantize_per_channel(tensors[ROW])[0])
    for name in ("model.norm.weight", "scalar", "empty"):
        assert torch.equal(result[name], tensors[name])
        assert result[name].shape == tensors[name].shape


def test_a_shard_of_nothing_but_scales_leaves_no_shard(tmp_path):
    folder = tmp_path / "fp8"
    weight, scale = quantize_block_fp8(torch.randn(4, 8))
    single(folder, {ROW: weight})
    save_file({f"{ROW}_scale_inv": scale}, folder / "scales.safetensors")
    weight_map = {ROW: "model.safetensors", f"{ROW}_scale_inv": "scales.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    convert(folder, tmp_path / "out", Settings())
    assert Checkpoint(tmp_path / "out").files() == ["model.safetensors"]
    assert not (tmp_path / "out" / "scales.safetensors").exists()


def test_c51_runs_without_triton(official, converted, tmp_path):
    code = f"""
import runpy, sys
sys.modules["triton"] = None  # import triton fails
sys.argv = ["convert.py", {str(official[0])!r}, {str(tmp_path / "out")!r}]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(converted)


def test_c53_memory_holds_a_few_tensors_and_not_the_model(large, official, tmp_path):
    code = f"""
import torch
from pathlib import Path
from moe_int8.models.deepseek.convert import Settings, convert

def peak_mb():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024

torch.set_num_threads(1)
convert(Path({str(official[0])!r}), Path({str(tmp_path / "small")!r}), Settings())  # what torch loads once
before = peak_mb()
convert(Path({str(large)!r}), Path({str(tmp_path / "out")!r}), Settings())
print(peak_mb() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    shutil.rmtree(tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 128  # four shards; the fp32 values of one shard alone would be 128


def test_two_workers_write_the_same_bytes(official, converted, tmp_path):
    convert(official[0], tmp_path / "out", Settings(), workers=2)
    assert contents(tmp_path / "out") == contents(converted)


def children(pid):
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("workers", [1, 2])
def test_c53_killed_in_the_middle_looks_unfinished_and_resumes_to_the_same_bytes(large, tmp_path, workers):
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), str(large), str(out), "--workers", str(workers)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("*.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    started = children(process.pid)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    while any(map(is_running, started)):  # nobody is left to write into the folder
        assert time.monotonic() < deadline
        time.sleep(0.01)

    finished = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert 0 < len(finished) < 8
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint(out)
    (out / ".7.safetensors.tmp123").write_bytes(b"half a shard")  # as a run killed at another moment leaves

    summary = convert(large, out, Settings())
    assert (summary.written, summary.shards) == (8 - len(finished), 8)
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
    convert(large, tmp_path / "whole", Settings())
    assert contents(out) == contents(tmp_path / "whole")
    shutil.rmtree(tmp_path)


def test_a_finished_conversion_is_left_as_it_is(official, converted):
    before = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    assert convert(official[0], converted, Settings()).written == 0
    assert {path: path.stat().st_mtime_ns for path in converted.iterdir()} == before


def test_a_lost_or_cut_shard_of_the_result_is_made_again(official, converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "out")
    (out / "model-00001-of-000003.safetensors").unlink()
    with open(out / "model-00002-of-000003.safetensors", "r+b") as shard:
        shard.truncate(5000)
    assert convert(official[0], out, Settings()).written == 2
    assert contents(out) == contents(converted)


def test_another_source_or_other_settings_do_not_resume(fp8, tmp_path):
    out = tmp_path / "out"
    convert(fp8, out, Settings())
    with pytest.raises(CheckpointError, match=r"begun with .*'compressed-tensors'.* not .*'w8a8_int8'"):
        convert(fp8, out, Settings(config_style="w8a8_int8"))
    os.utime(fp8 / "model-00002-of-000003.safetensors", (1, 1))
    with pytest.raises(CheckpointError, match="begun from another source"):
        convert(fp8, out, Settings())


def test_output_inside_the_source_or_with_foreign_files_is_refused(fp8, tmp_path):
    for out in (fp8, fp8 / "sub", tmp_path / "elsewhere" / ".." / "fp8"):
        with pytest.raises(CheckpointError, match="lies in the source"):
            convert(fp8, out, Settings())
    (tmp_path / "link").symlink_to(fp8)
    with pytest.raises(CheckpointError, match="lies in the source"):
        convert(fp8, tmp_path / "link", Settings())
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")  # a name of ours, but no conversion was begun there
    with pytest.raises(CheckpointError, match=r"holds config\.json, which is not part"):
        convert(fp8, foreign, Settings())
    assert (foreign / "config.json").read_text() == "{}"
    convert(fp8, tmp_path / "out", Settings())
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt"):
        convert(fp8, tmp_path / "out", Settings())
    with pytest.raises(CheckpointError, match="is a file"):
        convert(fp8, fp8.parent / "out" / "notes.txt", Settings())


def test_a_link_out_of_the_source_is_not_copied(fp8, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (fp8 / "tokenizer.json").unlink()
    (fp8 / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json links to .*secret, out of the folder"):
        convert(fp8, tmp_path / "out", Settings())
    assert not (tmp_path / "out").exists()  # seen before hours of work


def test_what_needs_no_conversion_is_refused(official, converted, tmp_path):
    with pytest.raises(CheckpointError, match="is INT8 already"):
        convert(converted, tmp_path / "out", Settings())
    bf16 = single(tmp_path / "bf16", {ROW: torch.ones(2, 2, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match="is bf16: only FP8 is converted to BF16"):
        convert(bf16, tmp_path / "out", Settings(to="bf16"))
    vector = single(tmp_path / "vector", {ROW: torch.ones(4)})
    with pytest.raises(CheckpointError, match=rf"{ROW} is torch.float32 \[4\]"):
        convert(vector, tmp_path / "out", Settings())
    with pytest.raises(CheckpointError, match="to must be one of"):
        convert(official[0], tmp_path / "out", Settings(to="int4"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [ROW, "model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"])
def test_values_that_are_not_finite_are_named(fp8, tmp_path, name):
    file = fp8 / Checkpoint(fp8).file_of(name)
    tensors = load_file(file)
    tensors[name] = tensors[name].float().index_fill_(0, torch.tensor([0]), torch.nan).to(tensors[name].dtype)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"{file}: {name} holds values that are not finite"):
        convert(fp8, tmp_path / "out", Settings())
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("to", ["int8", "bf16"])
@pytest.mark.parametrize(
    "value, message",
    [
        (-1.0, "has values that are negative or not finite"),
        (float("nan"), "has values that are negative or not finite"),
        (float("inf"), "has values that are negative or not finite"),
        (0.0, "is 0 for a block whose codes are not"),
    ],
    ids=str,
)
def test_block_scales_that_cannot_be_right_are_named_with_their_file(fp8, tmp_path, value, message, to):
    name = f"{ROW}_scale_inv"
    file = fp8 / Checkpoint(fp8).file_of(name)
    tensors = load_file(file)
    tensors[name][-1, 0] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"{file}: {name} {message}: download it again"):
        convert(fp8, tmp_path / "out", Settings(to=to))
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_block_scale_of_0_is_right_for_a_block_of_zeros(tmp_path):
    """Converters that do not bound the scale from below write it; a code of -0 is a zero too."""
    weight = torch.ones(130, 300)
    weight[:128, 128:256] = 0
    weight[3, 130] = -0.0
    scale = torch.ones(2, 3)
    scale[0, 1] = 0
    tensors = {ROW: weight.to(FP8), f"{ROW}_scale_inv": scale}
    convert(single(tmp_path / "fp8", tensors), tmp_path / "int8", Settings())
    result = load_file(tmp_path / "int8" / "model.safetensors")
    assert torch.equal(result[ROW], (weight * 127).to(torch.int8))


def test_too_small_a_disk_is_seen_before_the_start(official, tmp_path, monkeypatch):
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 10**6))
    with pytest.raises(CheckpointError, match=r"needs 1.23MB .* 1.00MB free"):
        convert(official[0], tmp_path / "out", Settings())
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_disk_that_fills_up_loses_nothing(official, converted, tmp_path, monkeypatch):
    write, written = converter._write_tensor, []

    def full(stream, tensor):
        written.append(tensor.nbytes)
        if len(written) == 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(stream, tensor)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(converter, "_write_tensor", full)
        with pytest.raises(CheckpointError, match=r"safetensors cannot be written \(No space left on device\)"):
            convert(official[0], out, Settings())
    assert len(list(out.glob("*.safetensors"))) >= 1
    assert not list(out.glob(".*"))
    assert not (out / "config.json").exists()
    convert(official[0], out, Settings())
    assert contents(out) == contents(converted)


def test_a_source_deleted_halfway_is_named_and_the_finished_shards_stay(fp8, tmp_path, monkeypatch):
    convert_shard, out = converter._convert_shard, tmp_path / "out"

    def convert_and_delete(*args):
        convert_shard(*args)
        (fp8 / "model-00003-of-000003.safetensors").unlink(missing_ok=True)

    monkeypatch.setattr(converter, "_convert_shard", convert_and_delete)
    with pytest.raises(CheckpointError, match=r"model-00003-of-000003.safetensors cannot be read"):
        convert(fp8, out, Settings())
    assert list(out.glob("*.safetensors"))
    assert not (out / "config.json").exists()


def test_a_source_that_changes_meanwhile_gives_no_result(fp8, tmp_path, monkeypatch):
    convert_shard = converter._convert_shard

    def convert_and_touch(*args):
        convert_shard(*args)
        os.utime(fp8 / "model-00001-of-000003.safetensors", (1, 1))

    monkeypatch.setattr(converter, "_convert_shard", convert_and_touch)
    with pytest.raises(CheckpointError, match="changed during the conversion"):
        convert(fp8, tmp_path / "out", Settings())
    assert not (tmp_path / "out" / "config.json").exists()


def killed(file):
    os.kill(os.getpid(), signal.SIGKILL)


def fails_or_leaves_a_mark(folder, file):
    if file == "model-00001-of-000003.safetensors":
        raise CheckpointError(f"{file} is bad")
    time.sleep(1)  # the first has failed by then
    (folder / file).touch()


@pytest.mark.parametrize("values", [1, 300, 2000])  # a row at a time, or a few: no block has a whole number of pieces
def test_pieces_of_any_size_give_the_same_bytes(official, converted, tmp_path, monkeypatch, values):
    monkeypatch.setattr(shards, "CPU_CHUNK", values)
    convert(official[0], tmp_path / "out", Settings())
    assert contents(tmp_path / "out") == contents(converted)
    errors = verify(official[0], converted)
    monkeypatch.undo()
    assert errors == verify(official[0], converted)


def test_one_thread_works_and_the_callers_number_comes_back(official, monkeypatch):
    """Steps of 50 microseconds that two threads share take ten times as long on a machine that has other work."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    calls: list[object] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    source = Checkpoint(official[0])
    list(for_each_shard(calls.append, source, source.files()[:2], workers=1))
    assert calls == [1, *source.files()[:2], 7]
    with pytest.raises(CheckpointError, match="is bad"):
        list(for_each_shard(partial(fails_or_leaves_a_mark, Path()), source, source.files(), workers=1))
    assert calls[-1] == 7


def test_a_killed_worker_is_reported(official):
    source = Checkpoint(official[0])
    with pytest.raises(CheckpointError, match="worker process was killed"):
        list(for_each_shard(killed, source, source.files(), workers=2))


def test_after_an_error_no_further_shard_is_begun(official, tmp_path):
    source = Checkpoint(official[0])
    task = partial(fails_or_leaves_a_mark, tmp_path)
    with pytest.raises(CheckpointError, match=r"model-00001-of-000003.safetensors is bad"):
        list(for_each_shard(task, source, source.files(), workers=2))
    assert not (tmp_path / "model-00003-of-000003.safetensors").exists()


def test_verify_bounds_every_kind_of_tensor(official, converted):
    errors = verify(official[0], converted)
    assert {"q_a_proj", "kv_b_proj", "mlp.gate_proj", "experts.up_proj", "shared_experts.down_proj"} < set(errors)
    assert errors["experts.up_proj"].tensors == 8  # 4 experts in the MoE layer and in the MTP layer
    assert (errors[CARRIED].largest, errors[CARRIED].bound) == (0, 0)
    for kind, e in errors.items():
        if kind != CARRIED:
            assert 0.45 / 127 < e.largest <= e.bound == 0.5 / 127 * 1.001  # rounding errors do come near half a step


def test_the_worst_of_equal_errors_does_not_depend_on_which_shard_ends_first():
    one, other = Errors(1, 0.0, 0.0, "a"), Errors(2, 0.0, 0.0, "b")
    assert one + other == other + one == Errors(3, 0.0, 0.0, "b")


def test_verify_with_two_workers_agrees(official, converted):
    assert verify(official[0], converted, workers=2) == verify(official[0], converted)


@pytest.mark.parametrize(
    "name, change, kind",
    [
        (ROW, lambda t: t.index_add(0, torch.tensor([3]), torch.ones(1, t.shape[1], dtype=torch.int8)), "o_proj"),
        (f"{ROW}_scale", lambda t: t * 1.02, "o_proj"),
        (f"{ROW}_scale", lambda t: t.index_fill(0, torch.tensor([3]), torch.nan), "o_proj"),
        ("model.norm.weight", lambda t: t * 2, CARRIED),
        ("lm_head.weight", lambda t: t.index_fill(0, torch.tensor([0]), 3.0), CARRIED),
    ],
    ids=["one code off", "scale 2 % off", "NaN scale", "norm doubled", "first row of a large tensor"],
)
def test_verify_finds_what_rounding_does_not_explain(official, converted, tmp_path, monkeypatch, name, change, kind):
    monkeypatch.setattr(shards, "CPU_CHUNK", 500)  # what is right further on does not hide it
    out = shutil.copytree(converted, tmp_path / "out")
    file = out / Checkpoint(out).file_of(name)
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name])}, file)
    e = verify(official[0], out)[kind]
    assert e.largest > e.bound
    assert e.worst == name.removesuffix("_scale")


def test_verify_names_a_tensor_that_one_of_both_lacks(official, converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "out")
    file = out / Checkpoint(out).file_of("model.norm.weight")
    tensors = load_file(file)
    tensors.pop("model.norm.weight")
    save_file(tensors, file)
    index = json.loads((out / INDEX).read_text())
    index["weight_map"].pop("model.norm.weight")
    (out / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model.norm.weight follows from .* is not in"):
        verify(official[0], out)


def test_script_verifies_reports_and_says_what_is_next(official, tmp_path):
    done = run_script(official[0], tmp_path / "out", "--verify")
    assert done.returncode == 0, done.stderr
    assert "wrote 3 of 3 shards, 1.21MB -> 1.2" in done.stdout
    assert "experts.gate_proj                   8" in done.stdout
    assert f"next: python scripts/inspect_checkpoint.py {tmp_path / 'out'}" in done.stdout
    (tmp_path / "out" / STATE).unlink()  # as if converted elsewhere: --verify only reads
    before = contents(tmp_path / "out")
    again = run_script(official[0], tmp_path / "out", "--verify")
    assert again.returncode == 0, again.stderr
    assert "wrote" not in again.stdout
    assert contents(tmp_path / "out") == before


def test_script_verifies_a_result_whatever_options_it_was_made_with(official, tmp_path, capsys):
    script = load_script("convert")
    for name, made in (("w8a8", Settings(config_style="w8a8_int8")), ("bf16", Settings(to="bf16"))):
        convert(official[0], tmp_path / name, made)
        before = contents(tmp_path / name)
        script.main([str(official[0]), str(tmp_path / name), "--verify"])
        assert re.search(r"^experts\.gate_proj|^to bf16", capsys.readouterr().out, re.MULTILINE)
        assert contents(tmp_path / name) == before
    (tmp_path / "w8a8" / "model-00002-of-000003.safetensors").unlink()
    with pytest.raises(SystemExit):
        script.main([str(official[0]), str(tmp_path / "w8a8"), "--verify"])
    assert "converting again, without --verify, completes the result" in capsys.readouterr().err


def test_script_fails_when_the_result_is_not_of_the_source(official, tmp_path):
    write_official_checkpoint(tmp_path / "other", TINY, seed=1)
    convert(tmp_path / "other", tmp_path / "out", Settings())
    (tmp_path / "out" / STATE).unlink()
    done = run_script(official[0], tmp_path / "out", "--verify")
    assert done.returncode == 1
    assert "more than rounding" in done.stderr
    assert "Traceback" not in done.stderr


def test_script_errors_are_one_line(tmp_path):
    done = run_script(tmp_path / "nothing", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'nothing'} is not a folder; give the folder of a DeepSeek checkpoint\n"
    assert done.stdout == ""
    done = run_script(tmp_path, tmp_path / "out", "--to", "bf16", "--config-style", "w8a8_int8")
    assert done.returncode == 2
    assert "--config-style" in done.stderr


def test_script_help_has_defaults_and_an_example():
    done = run_script("--help")
    assert done.returncode == 0
    assert "(default: compressed-tensors)" in done.stdout
    assert "python scripts/convert.py DeepSeek-R1 DeepSeek-R1-INT8" in done.stdout


@pytest.mark.parametrize(
    "name, damage",
    [("model.safetensors.index.json", "deleted"), ("config.json", "emptied"), ("tokenizer.json", "deleted")],
)
def test_a_finished_result_that_lost_a_small_file_is_completed_again(official, tmp_path, name, damage):
    convert(official[0], tmp_path / "out", Settings())
    before = contents(tmp_path / "out")
    if damage == "deleted":
        (tmp_path / "out" / name).unlink()
    else:
        (tmp_path / "out" / name).write_bytes(b"")
    assert convert(official[0], tmp_path / "out", Settings()).written == 0  # no shard
    assert contents(tmp_path / "out") == before
