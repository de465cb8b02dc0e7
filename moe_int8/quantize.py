"""Symmetric INT8 quantisation of rows: tokens of an activation, output channels of a weight.

amax[m] = max_k |x[m, k]|, not below 1e-10
scale[m] = amax[m] * (1/127)
q[m, k] = rint(x[m, k] * (127 / amax[m])), ties to even

All in fp32, so x is about q * scale, and the CPU, Triton's interpreter and a GPU give the same bits. A zero row has
zero codes and a finite scale; a row that holds NaN or Inf has zero codes and a scale that is not finite.
"""

import torch

from moe_int8.check import check_tensor
from moe_int8.custom_op import custom_op
from moe_int8.dispatch import use_triton
from moe_int8.numerics import ACTIVATION_DTYPES, CODE_MAX, MIN_AMAX, STEP

CPU_CHUNK = 2**18  # values that the CPU works on at a time: 1 MB in fp32


def check_rows(name: str, x: torch.Tensor, width: int | str = "K") -> None:
    """Check an activation [..., width] of two or more dimensions, to be worked on row by row.

    Raises:
        ValueError: dtype, number of dimensions, width or the stride of a row is wrong, or rows are empty.
    """
    leading = x.shape[:-1] if x.ndim > 2 else ("M",)
    check_tensor(name, x, (*leading, width), ACTIVATION_DTYPES)
    if x.shape[-1] == 0:
        raise ValueError(f"{name} must have rows of one value or more, got shape {list(x.shape)}")


def quantize_per_token_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `quantize_per_token` in plain torch; the kernel equals it bit for bit."""
    x = x.float()
    amax = x.abs().amax(dim=-1, keepdim=True).clamp_min(MIN_AMAX)  # NaN stays NaN
    factor = torch.full_like(amax, CODE_MAX) / amax  # CODE_MAX / amax would round twice: a reciprocal, then a product
    q = (x * factor).round_()
    if not amax.isfinite().all():  # rare, and a pass over the whole x
        q.masked_fill_(~amax.isfinite(), 0.0)
    return q.to(torch.int8, memory_format=torch.contiguous_format), amax * STEP


def quantize_per_token_cpu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_per_token_ref`, a few rows at a time: ten times as fast for a large x.

    Its temporaries then stay in the cache, and the allocator keeps their memory instead of having it mapped and zeroed
    by the kernel each time.
    """
    rows = max(1, CPU_CHUNK // x.shape[1])
    if len(x) <= rows:
        return quantize_per_token_ref(x)
    q = torch.empty(x.shape, dtype=torch.int8)
    scale = torch.empty(len(x), 1, dtype=torch.float32)
    for start in range(0, len(x), rows):
        own = slice(start, start + rows)
        q[own], scale[own] = quantize_per_token_ref(x[own])
    return q, scale


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each token (row) of `x` with its own scale.

    Args:
        x: [..., K] bf16, fp16 or fp32, of two or more dimensions; rows contiguous, other strides free.

    Returns:
        q: [..., K] int8 in -127..127, contiguous.
        scale: [..., 1] fp32, so that x is about q * scale.

    Raises:
        ValueError: the dtype, the shape or the stride of a row is wrong.
    """
    check_rows("x", x)
    q, scale = _quantize_per_token(x.flatten(0, -2))
    return q.view(x.shape), scale.view(*x.shape[:-1], 1)


def quantize_per_channel(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each output channel (row) of a weight with its own scale, by the rule of `quantize_per_token`.

    Args:
        w: [N, K], or [E, N, K] for experts, bf16, fp16 or fp32; rows contiguous.

    Returns:
        q: int8 in -127..127, shaped as w, contiguous.
        scale: [N, 1] or [E, N, 1] fp32, so that w is about q * scale.

    Raises:
        ValueError: the dtype, the shape or the stride of a row is wrong.
    """
    check_tensor("w", w, ("E", "N", "K") if w.ndim == 3 else ("N", "K"), ACTIVATION_DTYPES)
    return quantize_per_token(w)


def dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q * scale in fp32, rounded once to `dtype`: the values that stand behind the codes.

    Args:
        q: [..., N, K] int8.
        scale: fp32, one number a row of q: [..., N, 1] or [..., N].
        dtype: of the result.

    Returns:
        [..., N, K].

    Raises:
        ValueError: a dtype or shape is wrong.
    """
    check_tensor("q", q, q.shape if q.ndim > 1 else ("N", "K"), torch.int8, contiguous_rows=False)
    shape = q.shape[:-1] if scale.ndim == q.ndim - 1 else (*q.shape[:-1], 1)
    check_tensor("scale", scale, shape, torch.float32, device=q.device, contiguous_rows=False)
    return q.float().mul_(scale.reshape(*q.shape[:-1], 1)).to(dtype)


@custom_op("quantize_per_token")
def _quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if use_triton(x):
        from moe_int8.kernels.quantize import launch_quantize_per_token

        with torch.cuda.device_of(x):
            return launch_quantize_per_token(x)
    return quantize_per_token_cpu(x)


@_quantize_per_token.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)
