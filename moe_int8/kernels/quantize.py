"""The kernel of moe_int8.quantize: one program a row, one pass for the largest magnitude and one for the codes."""

import torch
import triton
import triton.language as tl

from moe_int8.kernels.common import abs_bits, amax_from_bits, quantize_with_amax, scale_from_amax
from moe_int8.kernels.rows import row_options


@triton.jit
def _quantize_per_token_kernel(x_ptr, q_ptr, scale_ptr, stride_xm, K: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    x_ptr += m * stride_xm
    q_ptr += m * K
    offs = tl.arange(0, BLOCK)
    bits = 0
    for start in range(0, K, BLOCK):
        mask = start + offs < K
        x = tl.load(x_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, tl.max(abs_bits(x)))
    amax = amax_from_bits(bits)
    for start in range(0, K, BLOCK):
        mask = start + offs < K
        x = tl.load(x_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + start + offs, quantize_with_amax(x, amax), mask=mask)
    tl.store(scale_ptr + m, scale_from_amax(amax))


def launch_quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> codes int8 [M, K], scale fp32 [M, 1]."""
    M, K = x.shape
    q = torch.empty((M, K), dtype=torch.int8, device=x.device)
    scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    if M:
        _quantize_per_token_kernel[(M,)](x, q, scale, x.stride(0), K, **row_options(K))
    return q, scale
