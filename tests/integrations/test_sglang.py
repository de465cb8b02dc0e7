"""The plugin against SGLang's own classes. `make test-vllm` makes the environment; a whole SGLang needs a GPU."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("sglang_worker.py")
SITE = Path(sys.prefix) / "sglang"  # beside vLLM's packages, whose pins are not SGLang's


@pytest.mark.sglang
def test_w8a8_int8_experts_of_sglang_run_on_our_operator():
    environment = os.environ | {"PYTHONPATH": str(SITE), "SGLANG_USE_CPU_ENGINE": "0"}
    run = subprocess.run([sys.executable, WORKER], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.splitlines()[-1:] == ["ok"], run.stderr
    assert run.stderr.count("moe-int8 is active: INT8 experts by moe-int8, accumulator int32") == 1


def test_the_entry_points_name_functions_that_load_without_their_frameworks():
    found = {e.group: e for e in metadata.distribution("moe-int8").entry_points}
    for group, framework in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert found[group].value == f"moe_int8.integrations.{framework}:register"
        assert callable(found[group].load())


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_without_the_framework_or_with_another_interface_registering_warns_and_does_not_raise(framework):
    code = f"""
import sys
sys.modules["{framework}"] = None  # importing it fails, as it does where the interface has moved
from moe_int8.integrations.{framework} import register
register()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "is not active, vLLM runs without it" in run.stderr or "is NOT active, SGLang runs its own" in run.stderr
    assert "newer moe-int8" in run.stderr
