"""The demo's verdict, by the Makefile's own command: right for its INT8 checkpoint, wrong once scales are shuffled."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The folder with fp8, int8 and bf16, as `make demo` makes them."""
    folder = tmp_path_factory.mktemp("demo")
    for step in (
        "make_demo_checkpoint.py --output {}/fp8",
        "convert.py {0}/fp8 {0}/int8",
        "convert.py {0}/fp8 {0}/bf16 --to bf16",
    ):
        done = run("scripts/" + step.format(folder))
        assert done.returncode == 0, done.stderr
    return folder


def verdict(demo: Path, candidate: str) -> subprocess.CompletedProcess[str]:
    """The last command of `make demo`, on this folder and with this INT8 checkpoint."""
    (command,) = re.findall(r"\$\(PYTHON\) (scripts/compare_models\.py .*)", (ROOT / "Makefile").read_text())
    return run(command.replace("demo/bf16", f"{demo}/bf16").replace("demo/int8", f"{demo}/{candidate}"))


def test_the_demo_is_ok(demo):
    done = verdict(demo, "int8")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("demo: ok")


def test_shuffled_weight_scales_are_not_ok(demo):
    shutil.copytree(demo / "int8", demo / "shuffled")
    generator = torch.Generator().manual_seed(0)
    for file in (demo / "shuffled").glob("*.safetensors"):
        tensors = load_file(file)
        for name, scale in tensors.items():
            if name.endswith("weight_scale"):
                tensors[name] = scale[torch.randperm(len(scale), generator=generator)].contiguous()
        save_file(tensors, file)
    done = verdict(demo, "shuffled")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("demo: failed")


def test_inspect_says_what_it_is_and_what_comes_next(demo):
    fp8, int8 = run(f"scripts/inspect_checkpoint.py {demo}/fp8"), run(f"scripts/inspect_checkpoint.py {demo}/int8")
    assert "FP8 weights do not run" in fp8.stdout
    assert fp8.stdout.splitlines()[-1] == f"next: python scripts/convert.py {demo}/fp8 {demo}/fp8-INT8"
    assert "DeepseekV3ForCausalLM, INT8" in int8.stdout
    assert int8.stdout.splitlines()[-1] == f'next: python scripts/generate.py --model {demo}/int8 --prompt "Hello"'
    assert [int(size) for size in re.findall(r"^ +(\d+) ", int8.stdout, re.MULTILINE)] == [1, 2, 4, 8]


def test_inspect_predicts_the_bytes_that_loading_takes(demo, tmp_path):
    from moe_int8.models.deepseek.weights import load_model

    run(f"scripts/inspect_checkpoint.py {demo}/int8 --json {tmp_path}/facts.json")
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["weight_bytes_per_rank"]["INT8"]["1"] == load_model(demo / "int8", say=lambda _: None).weight_bytes()
    assert facts["bytes"] == sum(file.stat().st_size for file in (demo / "int8").glob("*.safetensors"))


def test_comparing_different_models_is_refused(demo, tmp_path):
    shutil.copytree(demo / "bf16", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 1.0}))
    done = run(f"scripts/compare_models.py {demo}/int8 {tmp_path}/other --device cpu")
    assert done.returncode == 1
    assert "are not the same model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_text_that_is_too_short_is_refused(demo, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Hello there.")
    compare = f"scripts/compare_models.py {demo}/bf16 {demo}/int8 --device cpu --text {text}"
    done = run(compare)
    assert done.returncode != 0
    assert re.search(r"error: .*short\.txt has \d tokens, 8 texts of 128 take 1024", done.stderr)
    enough = run(f"{compare} --sequences 1 --length 2")
    assert "2 positions" in enough.stdout, enough.stderr
