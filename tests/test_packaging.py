"""What a wheel holds, and what importing the package needs."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_one_top_level_package_with_everything_in_it(tmp_path):
    source = tmp_path / "source"  # a copy: building leaves files beside setup.py
    source.mkdir()
    for name in ("moe_int8", "models", "parallel", "serving", "evals", "tests", "scripts"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"moe_int8"}
    for package in (
        "",
        "kernels/",
        "quantization/",
        "integrations/",
        "models/",
        "models/deepseek/",
        "parallel/",
        "serving/",
        "evals/",
    ):
        assert f"moe_int8/{package}__init__.py" in names
    for file in ("kernels/moe_gemm.py", "models/deepseek/model.py", "parallel/linear.py", "py.typed"):
        assert f"moe_int8/{file}" in names


def test_importing_needs_no_triton_and_starts_no_cuda():
    code = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch, moe_int8, moe_int8.models.deepseek.convert, moe_int8.models.deepseek.generate, moe_int8.parallel
assert not torch.cuda.is_initialized()
q, scale = moe_int8.quantize_per_token(torch.ones(2, 4))
assert q.tolist() == [[127] * 4] * 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
