"""INT8 in a model of your own: quantize the weights of one MoE block once, then run it. Needs no GPU.

python examples/own_model.py
"""

import torch

from moe_int8 import fused_moe, grouped_topk, quantize_per_channel, w8a8_linear

M, H, N, E, TOPK = 4, 256, 128, 8, 2  # tokens, hidden size, intermediate size, experts, experts of a token
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
proj, gate_up, down, router = (torch.randn(s, device=device) / 16 for s in [(H, H), (E, 2 * N, H), (E, H, N), (E, H)])

weight, weight_scale = quantize_per_channel(proj)  # int8 codes, one fp32 scale for each output channel
w13, w13_scale = quantize_per_channel(gate_up)  # of each expert: gate rows, then up rows
w2, w2_scale = quantize_per_channel(down)


def block(x: torch.Tensor) -> torch.Tensor:
    """x [M, H] -> [M, H]; activations are quantized per token inside the operators."""
    x = w8a8_linear(x, weight, weight_scale)
    topk_weights, topk_ids = grouped_topk(x.float() @ router.T, top_k=TOPK)
    return x + fused_moe(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids)


y = block(torch.randn(M, H, dtype=torch.bfloat16, device=device))
print(f"{list(y.shape)} {y.dtype}, root mean square {y.float().square().mean().sqrt():.3f}")
