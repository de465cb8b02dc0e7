"""Operators run where their tensors are, whatever the current device is."""

import pytest
import torch

from moe_int8 import fused_moe, grouped_topk, quantize_per_channel, rms_norm, silu_and_mul, w8a8_linear


@pytest.mark.multigpu
def test_tensors_on_a_device_that_is_not_the_current_one():
    torch.cuda.set_device(0)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    weight, weight_scale = quantize_per_channel(torch.randn(128, 64))
    w13, w13_scale = quantize_per_channel(torch.randn(4, 64, 64))
    w2, w2_scale = quantize_per_channel(torch.randn(4, 64, 32))
    logits = torch.randn(4, 4)

    def run(device: str) -> list[torch.Tensor]:
        on = [t.to(device) for t in (x, weight, weight_scale, w13, w13_scale, w2, w2_scale, logits)]
        norm = rms_norm(on[0], torch.ones(64, device=device), 1e-6)
        moe = fused_moe(on[0], *on[3:7], *grouped_topk(on[7], top_k=2))
        return [t.cpu() for t in (w8a8_linear(on[0], on[1], on[2]), norm, silu_and_mul(on[0]), moe)]

    for other, first in zip(run("cuda:1"), run("cuda:0")):
        assert torch.equal(other, first)
