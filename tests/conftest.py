"""Fixtures of all tests. The same operator tests run on the CPU path, in Triton's interpreter and on a GPU."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a network

import hypothesis
import pytest
import torch

from moe_int8.dispatch import INTERPRETED

if os.environ.get("CI"):  # a change is judged by the same examples every time; at a desk new ones are looked for
    hypothesis.settings.register_profile("ci", derandomize=True)
    hypothesis.settings.load_profile("ci")

torch.set_num_threads(1)  # two gloo ranks share the machine, and fork hangs once torch's threads have run

if INTERPRETED:
    import triton_interpreter_bf16

    triton_interpreter_bf16.install()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A test that takes `device` runs on the CPU (interpreted under TRITON_INTERPRET=1) and, with -m gpu, on a GPU."""
    return request.param


@pytest.fixture(autouse=True)
def _poison_empty() -> None:
    """torch.empty holds NaN (integers: their maximum), so that an output nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
