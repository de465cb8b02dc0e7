"""The kernels of moe_int8.norm: RMSNorm of a row, with the residual added before it and the codes taken after it."""

import torch
import triton
import triton.language as tl

from moe_int8.kernels.common import abs_bits, amax_from_bits, quantize_with_amax, scale_from_amax
from moe_int8.kernels.rows import row_options


@triton.jit
def _load_sum(x_ptr, residual_ptr, offs, mask):
    """x + residual, rounded once to x's dtype; x alone where there is no residual."""
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return x


@triton.jit
def _inverse_rms(x_ptr, residual_ptr, EPS: tl.constexpr, offs, K: tl.constexpr, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps), rounded to fp32 from fp64.

    In fp64 the products are exact and the order of the sum moves nothing that survives the rounding. In fp32 it would:
    the order follows the thread layout, which the compiler chooses for each kernel.
    """
    total = tl.zeros((), tl.float64)
    for start in range(0, K, BLOCK):
        x = _load_sum(x_ptr, residual_ptr, start + offs, start + offs < K).to(tl.float32).to(tl.float64)
        total += tl.sum(x * x)
    return (1.0 / tl.sqrt(total / K + EPS)).to(tl.float32)


@triton.jit
def _normalized(x, weight_ptr, inverse_rms, offs, mask):
    """One block of the norm in x's dtype: both kernels round here, so that they agree."""
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * inverse_rms * weight).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    new_residual_ptr,
    stride_xm,
    stride_residual_m,
    EPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    x_ptr += m * stride_xm
    y_ptr += m * K
    if residual_ptr is not None:
        residual_ptr += m * stride_residual_m
        new_residual_ptr += m * K
    offs = tl.arange(0, BLOCK)
    inverse_rms = _inverse_rms(x_ptr, residual_ptr, EPS, offs, K, BLOCK)
    for start in range(0, K, BLOCK):
        at = start + offs
        mask = at < K
        x = _load_sum(x_ptr, residual_ptr, at, mask)
        tl.store(y_ptr + at, _normalized(x, weight_ptr, inverse_rms, at, mask), mask=mask)
        if residual_ptr is not None:
            tl.store(new_residual_ptr + at, x, mask=mask)


@triton.jit
def _rms_norm_quantize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    q_ptr,
    scale_ptr,
    new_residual_ptr,
    stride_xm,
    stride_residual_m,
    EPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    x_ptr += m * stride_xm
    q_ptr += m * K
    if residual_ptr is not None:
        residual_ptr += m * stride_residual_m
        new_residual_ptr += m * K
    offs = tl.arange(0, BLOCK)
    inverse_rms = _inverse_rms(x_ptr, residual_ptr, EPS, offs, K, BLOCK)
    bits = 0
    for start in range(0, K, BLOCK):
        at = start + offs
        mask = at < K
        x = _load_sum(x_ptr, residual_ptr, at, mask)
        y = _normalized(x, weight_ptr, inverse_rms, at, mask).to(tl.float32)
        bits = tl.maximum(bits, tl.max(abs_bits(y)))
    amax = amax_from_bits(bits)
    for start in range(0, K, BLOCK):
        at = start + offs
        mask = at < K
        x = _load_sum(x_ptr, residual_ptr, at, mask)
        y = _normalized(x, weight_ptr, inverse_rms, at, mask).to(tl.float32)
        tl.store(q_ptr + at, quantize_with_amax(y, amax), mask=mask)
        if residual_ptr is not None:
            tl.store(new_residual_ptr + at, x, mask=mask)
    tl.store(scale_ptr + m, scale_from_amax(amax))


def launch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> list[torch.Tensor]:
    """[M, K] -> y [M, K] in x's dtype, and the new residual [M, K] where one is given."""
    M, K = x.shape
    y = torch.empty((M, K), dtype=x.dtype, device=x.device)
    new_residual = None if residual is None else torch.empty_like(y)
    if M:
        _rms_norm_kernel[(M,)](
            x, residual, weight, y, new_residual, x.stride(0), _row_stride(residual), eps, K, **row_options(K)
        )
    return [y] if new_residual is None else [y, new_residual]


def launch_rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> list[torch.Tensor]:
    """[M, K] -> codes int8 [M, K], scale fp32 [M, 1], and the new residual [M, K] where one is given."""
    M, K = x.shape
    q = torch.empty((M, K), dtype=torch.int8, device=x.device)
    scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    new_residual = None if residual is None else torch.empty((M, K), dtype=x.dtype, device=x.device)
    if M:
        _rms_norm_quantize_kernel[(M,)](
            x, residual, weight, q, scale, new_residual, x.stride(0), _row_stride(residual), eps, K, **row_options(K)
        )
    return [q, scale] if new_residual is None else [q, scale, new_residual]


def _row_stride(residual: torch.Tensor | None) -> int:
    return 0 if residual is None else residual.stride(0)
