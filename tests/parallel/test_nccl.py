"""The model on several GPUs over NCCL, against the same model on one."""

import os
import subprocess
import sys
from pathlib import Path

import nccl_worker
import pytest
import torch
from official_layout import TINY, write_official_checkpoint

from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.parallel import Groups

# Heads and widths for up to 8 ranks; every expert is chosen, so that rounding cannot flip a choice.
CONFIG = TINY | {
    "num_attention_heads": 8,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "num_experts_per_tok": 4,
    "topk_group": 2,
}
SIZES = [size for size in (2, 4, 8) if size <= max(torch.cuda.device_count(), 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("nccl")
    write_official_checkpoint(base / "fp8", CONFIG)
    convert(base / "fp8", base / "int8", Settings())
    return base / "int8"


@pytest.fixture(scope="module")
def one(folder) -> dict[str, torch.Tensor]:
    return nccl_worker.run(folder, Groups(), torch.device("cuda", 0))


@pytest.fixture(scope="module", params=SIZES)
def several(folder, request) -> dict[str, torch.Tensor]:
    worker = [str(Path(__file__).with_name("nccl_worker.py")), str(folder)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    done = subprocess.run([*launch, *worker], capture_output=True, text=True, timeout=180, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(folder / f"ranks-{request.param}.pt")


@pytest.mark.multigpu
def test_fp32_logits_and_greedy_tokens_do_not_depend_on_the_number_of_gpus(one, several):
    """Ranks add partial sums in another order: a few fp32 roundings, 6e-8 each, of logits and activations of order 1,
    through two layers of sums over up to 1,000 terms."""
    torch.testing.assert_close(several["fp32 logits"], one["fp32 logits"], rtol=0, atol=5e-5)
    assert several["tokens"] == one["tokens"]


@pytest.mark.multigpu
def test_int8_stays_within_the_noise_of_its_activations(one, several):
    """As on two gloo ranks, where the bound is derived (tests/parallel/test_tensor_parallel.py)."""
    difference = several["int8 logits"] - one["int8 logits"]
    assert 1e-3 < difference.norm() / one["int8 logits"].norm() < 0.09
