"""The kernels of moe_int8.activation: SwiGLU of [M, 2 * K] rows (gate, then up), rounded to the input's dtype."""

import torch
import triton
import triton.language as tl

from moe_int8.kernels.common import abs_bits, amax_from_bits, quantize_with_amax, scale_from_amax, swiglu
from moe_int8.kernels.rows import row_options


@triton.jit
def _rounded_swiglu(gate_up_ptr, offs, mask, K):
    """One block of h in the dtype of gate_up: both kernels round here, so that they agree."""
    gate = tl.load(gate_up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + K + offs, mask=mask, other=0.0).to(tl.float32)
    return swiglu(gate, up).to(gate_up_ptr.dtype.element_ty)


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, h_ptr, stride_gate_up_m, K: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    gate_up_ptr += m * stride_gate_up_m
    h_ptr += m * K
    offs = tl.arange(0, BLOCK)
    for start in range(0, K, BLOCK):
        mask = start + offs < K
        tl.store(h_ptr + start + offs, _rounded_swiglu(gate_up_ptr, start + offs, mask, K), mask=mask)


@triton.jit
def _silu_and_mul_quantize_kernel(
    gate_up_ptr, q_ptr, scale_ptr, stride_gate_up_m, K: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64)
    gate_up_ptr += m * stride_gate_up_m
    q_ptr += m * K
    offs = tl.arange(0, BLOCK)
    bits = 0
    for start in range(0, K, BLOCK):
        mask = start + offs < K
        h = _rounded_swiglu(gate_up_ptr, start + offs, mask, K).to(tl.float32)
        bits = tl.maximum(bits, tl.max(abs_bits(h)))
    amax = amax_from_bits(bits)
    for start in range(0, K, BLOCK):
        mask = start + offs < K
        h = _rounded_swiglu(gate_up_ptr, start + offs, mask, K).to(tl.float32)
        tl.store(q_ptr + start + offs, quantize_with_amax(h, amax), mask=mask)
    tl.store(scale_ptr + m, scale_from_amax(amax))


def launch_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[M, 2 * K] -> h [M, K] in the dtype of gate_up."""
    M, K = gate_up.shape[0], gate_up.shape[1] // 2
    h = torch.empty((M, K), dtype=gate_up.dtype, device=gate_up.device)
    if M:
        _silu_and_mul_kernel[(M,)](gate_up, h, gate_up.stride(0), K, **row_options(K))
    return h


def launch_silu_and_mul_quantize(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, 2 * K] -> codes of h int8 [M, K], scale fp32 [M, 1]."""
    M, K = gate_up.shape[0], gate_up.shape[1] // 2
    q = torch.empty((M, K), dtype=torch.int8, device=gate_up.device)
    scale = torch.empty((M, 1), dtype=torch.float32, device=gate_up.device)
    if M:
        _silu_and_mul_quantize_kernel[(M,)](gate_up, q, scale, gate_up.stride(0), K, **row_options(K))
    return q, scale
