"""RMSNorm, with the residual added before it and the codes of its result taken after it.

x' = x + residual, an fp32 sum rounded once to x's dtype: the new residual
y = x' * (1 / sqrt(mean(x'^2) + eps)) * weight, in fp32, rounded once to x's dtype

The factor in brackets is computed in fp64 and rounded to fp32: in fp64 the squares are exact, and the order in which a
device adds them up moves bits that the rounding drops.
"""

from typing import overload

import torch

from moe_int8.check import check_tensor
from moe_int8.custom_op import custom_op
from moe_int8.dispatch import use_triton
from moe_int8.numerics import ACTIVATION_DTYPES
from moe_int8.quantize import check_rows, quantize_per_token_ref


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The definition of `rms_norm` in plain torch: [y], or [y, new_residual] where a residual is given."""
    new_residual = [] if residual is None else [(x.float() + residual.float()).to(x.dtype)]
    x = new_residual[0] if new_residual else x
    mean = x.double().square().mean(dim=-1, keepdim=True)
    y = x.float() * (mean + eps).sqrt().reciprocal().float() * weight.float()
    return [y.to(x.dtype), *new_residual]


def rms_norm_quantize_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The definition of `rms_norm_quantize` in plain torch: [q, scale], and the new residual where one is given."""
    y, *new_residual = rms_norm_ref(x, weight, eps, residual)
    return [*quantize_per_token_ref(y), *new_residual]


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of each token (row), of x + residual where a residual is given.

    Args:
        x: [..., K] bf16, fp16 or fp32, of two or more dimensions; rows contiguous, other strides free.
        weight: [K] bf16, fp16 or fp32.
        eps: added to the mean of the squares.
        residual: shaped as x and of its dtype, or None.

    Returns:
        y: [..., K] in x's dtype, contiguous.
        new_residual: x + residual, as y; only where a residual is given. No input is overwritten.

    Raises:
        ValueError: a dtype, shape, device or the stride of a row is wrong.
    """
    _check(x, weight, residual)
    y, *new_residual = _rms_norm(x.flatten(0, -2), weight, eps, None if residual is None else residual.flatten(0, -2))
    return (y.view(x.shape), new_residual[0].view(x.shape)) if new_residual else y.view(x.shape)


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_per_token(rms_norm(x, weight, eps, residual))` in one kernel, with the same bits.

    Args:
        x, weight, eps, residual: as for `rms_norm`.

    Returns:
        q: [..., K] int8 in -127..127, contiguous.
        scale: [..., 1] fp32, so that y is about q * scale.
        new_residual: x + residual in x's dtype, contiguous; only where a residual is given.

    Raises:
        ValueError: a dtype, shape, device or the stride of a row is wrong.
    """
    _check(x, weight, residual)
    rows = None if residual is None else residual.flatten(0, -2)
    q, scale, *new_residual = _rms_norm_quantize(x.flatten(0, -2), weight, eps, rows)
    q, scale = q.view(x.shape), scale.view(*x.shape[:-1], 1)
    return (q, scale, new_residual[0].view(x.shape)) if new_residual else (q, scale)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    check_rows("x", x)
    check_tensor("weight", weight, (x.shape[-1],), ACTIVATION_DTYPES, device=x.device)
    if residual is not None:
        check_tensor("residual", residual, x.shape, x.dtype, device=x.device)


@custom_op("rms_norm")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> list[torch.Tensor]:
    if use_triton(x):
        from moe_int8.kernels.rms_norm import launch_rms_norm

        with torch.cuda.device_of(x):
            return launch_rms_norm(x, weight, eps, residual)
    return rms_norm_ref(x, weight, eps, residual)


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for _ in range(1 if residual is None else 2)]


@custom_op("rms_norm_quantize")
def _rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> list[torch.Tensor]:
    if use_triton(x):
        from moe_int8.kernels.rms_norm import launch_rms_norm_quantize

        with torch.cuda.device_of(x):
            return launch_rms_norm_quantize(x, weight, eps, residual)
    return rms_norm_quantize_ref(x, weight, eps, residual)


@_rms_norm_quantize.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> list[torch.Tensor]:
    new_residual = [] if residual is None else [x.new_empty(x.shape)]
    q, scale = x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)
    return [q, scale, *new_residual]
