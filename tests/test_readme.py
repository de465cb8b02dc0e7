"""What the README claims is computed here again, and what it shows is run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from official_layout import TINY, TINY_V2_LITE, shapes, write_official_checkpoint
from ranks import load_script

from moe_int8.models.deepseek.cache import LatentCache
from moe_int8.models.deepseek.checkpoint import Checkpoint
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.memory import weight_bytes
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.published import R1
from moe_int8.quantization.block_fp8 import scale_shape

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIG = DeepseekConfig.from_dict(R1)


def test_c80_fp8_and_the_memory_per_gpu_are_on_the_first_screen():
    screen = "\n".join(README.splitlines()[:30])
    assert "FP8 weights do not run on an A100" in screen
    assert "python scripts/convert.py" in screen
    for name, int8 in (("INT8", True), ("BF16", False)):
        precision = Precision(torch.bfloat16, lambda _, int8=int8: int8)
        cells = " | ".join(f"{weight_bytes(CONFIG, precision, tp) / 1e9:.1f} GB" for tp in (8, 16, 32))
        assert f"| {name} | {cells} |" in screen
    megabytes = LatentCache.bytes_per_token(CONFIG, torch.bfloat16) * 1000 / 1e6
    assert f"Add {megabytes:.0f} MB for every 1,000 tokens" in README


def section(title: str) -> str:
    """A section of the README, in one line."""
    (text,) = re.findall(rf"^## {title}\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    return " ".join(text.split())


def r1_bytes(form: str, layers: int) -> int:
    """Bytes of R1's tensors in its files, those of the first `layers` layers and of no layer."""
    total = 0
    for name, shape in shapes(R1).items():
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match and int(match[1]) >= layers:
            continue
        elements = torch.Size(shape).numel()
        if projection_kind(name):
            total += elements + 4 * (shape[0] if form == "int8" else torch.Size(scale_shape(shape)).numel())
        else:
            total += elements * (4 if name.endswith("e_score_correction_bias") else 2)
    return total


def test_c83_disk_and_times_follow_from_the_sizes_of_r1():
    fp8, int8 = (r1_bytes(form, layers=62) for form in ("fp8", "int8"))
    text = section("Convert")
    assert f"| disk | {fp8 / 1e9:.0f} GB for the FP8 files and {int8 / 1e9:.0f} GB for the INT8 ones |" in text
    minutes, speed = re.findall(r"\| time \| (\d+) minutes at the (\d+) MB/s", text)[0]
    assert int(minutes) == round(fp8 / (int(speed) * 1e6) / 60)
    read = r1_bytes("int8", layers=61) / 1e9  # what loading reads: not the layer of multi-token prediction
    first, second, third = (f"{read / speed:.0f}" for speed in (1, 2, 5))
    assert f"reads up to {read:.0f} GB on each node" in text
    assert f"{first}, {second} or {third} s at 1, 2 or 5 GB/s" in text


@pytest.mark.parametrize("config", [TINY, TINY_V2_LITE], ids=["v3", "v2-lite"])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_c83_a_conversion_holds_the_tensors_that_are_listed(tmp_path, config, fp8):
    """Names, dtypes and shapes as the table says; the words of the table are asserted so that both change together."""
    write_official_checkpoint(tmp_path / "source", config, fp8=fp8)
    convert(tmp_path / "source", tmp_path / "result", Settings())
    source, result = Checkpoint(tmp_path / "source"), Checkpoint(tmp_path / "result")
    text = section("Convert")
    assert "| `X.weight` | int8 | `[N, K]`, as in the source; codes -127 to 127 |" in text
    assert "| `X.weight_scale` | fp32 | `[N, 1]`; the weight is `X.weight * X.weight_scale` |" in text
    assert "| all others | as in the source | embeddings, `lm_head`, norms, the router `mlp.gate`, layer 61" in text
    projections = re.findall(r"`(\w+)`", text.split("X is each projection")[1].split(".")[0])
    assert len(projections) == 9
    expected = {}
    for name in source.names():
        if name.endswith("_scale_inv"):
            continue
        shape = source.shape(name)
        if name.split(".")[-2] in projections:
            expected[name] = (torch.int8, shape)
            expected[f"{name}_scale"] = (torch.float32, (shape[0], 1))
        else:
            expected[name] = (source.dtype(name), shape)
    assert {name: (result.dtype(name), result.shape(name)) for name in result.names()} == expected
    assert result.files() == source.files()
    codes = [result.tensor(name) for name, (dtype, _) in expected.items() if dtype is torch.int8]
    assert (min(c.min() for c in codes), max(c.max() for c in codes)) == (-127, 127)


def test_c83_the_command_that_checks_a_conversion_passes_one_and_fails_another(tmp_path, capsys):
    command = "`python scripts/convert.py SOURCE TARGET --verify` checks a conversion that is there"
    assert command in section("Convert")
    write_official_checkpoint(tmp_path / "source", TINY)
    write_official_checkpoint(tmp_path / "other", TINY, seed=1)
    convert(tmp_path / "source", tmp_path / "target", Settings(config_style="w8a8_int8"))
    script = load_script("convert")
    script.main([str(tmp_path / "source"), str(tmp_path / "target"), "--verify"])
    assert "largest error" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        script.main([str(tmp_path / "other"), str(tmp_path / "target"), "--verify"])
    assert stop.value.code == 1
    assert "more than rounding" in capsys.readouterr().err


def test_c83_the_options_of_the_converter_are_those_listed(capsys):
    with pytest.raises(SystemExit):
        load_script("convert").main(["--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    table = section("Convert").split("| R1 needs |")[0]
    assert {option.split()[0] for option in re.findall(r"\| `(--[^`]+)` \|", table)} == options


def test_the_code_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict[str, torch.Tensor] = {}
    exec(code, scope)
    assert scope["y"].shape == (4, 512)
    assert scope["out"].shape == (4, 256)
    assert scope["out"].isfinite().all()
    assert scope["out"].any()


def test_the_files_and_commands_exist():
    for path in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / path).exists(), path
    for script in re.findall(r"scripts/(\w+)\.py", README):
        assert (ROOT / "scripts" / f"{script}.py").exists(), script
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"make ([a-z-]+)", README):
        assert target in targets, target


def test_c81_the_tested_versions_are_the_pinned_ones():
    cpu, gpu = re.findall(r"torch (\S+) and Triton (\S+) \((?:CPU|H200)\)", README.split("## Tested versions")[1])
    pins = (ROOT / "constraints.txt").read_text()
    assert f"torch=={cpu[0]}\n" in pins
    assert f"triton=={cpu[1]}\n" in pins
    measured = json.loads((ROOT / "benchmarks" / "results" / "step_h200.json").read_text())
    assert (measured["torch"].split("+")[0], measured["triton"]) == gpu


def test_the_measured_tables_are_those_of_the_result_files():
    subprocess.run([sys.executable, ROOT / "scripts" / "readme_tables.py", "--check"], check=True, timeout=60)
