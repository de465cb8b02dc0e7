"""What the README claims is computed here again, and what it shows is run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from moe_int8.models.deepseek.cache import LatentCache
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.memory import weight_bytes
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.published import R1

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
