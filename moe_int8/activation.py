"""SwiGLU, alone and together with the quantisation of its result."""

import torch

from moe_int8.custom_op import custom_op
from moe_int8.dispatch import use_triton
from moe_int8.quantize import check_rows, quantize_per_token_ref


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up = gate / (1 + exp(-gate)) * up, on fp32 tensors of one shape.

    The one formula of all paths. Not F.silu: on a CPU its vectorised part and its scalar tail round differently, so
    that a value would depend on its position.
    """
    return gate / (1 + torch.exp(-gate)) * up


def silu_and_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The definition of `silu_and_mul` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return swiglu(gate, up).to(gate_up.dtype)


def silu_and_mul_quantize_ref(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `silu_and_mul_quantize` in plain torch."""
    return quantize_per_token_ref(silu_and_mul_ref(gate_up))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """h = silu(gate) * up for each row, computed in fp32 and rounded once.

    Args:
        gate_up: [..., 2 * I] bf16, fp16 or fp32, of two or more dimensions: gate, then up; rows contiguous, other
            strides free.

    Returns:
        h: [..., I] in the dtype of gate_up, contiguous. Devices differ by their exp (1-2 ulp before the rounding).

    Raises:
        ValueError: the dtype, the shape or the stride of a row is wrong.
    """
    _check_gate_up(gate_up)
    h = _silu_and_mul(gate_up.flatten(0, -2))
    return h.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def silu_and_mul_quantize(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_per_token(silu_and_mul(gate_up))` in one kernel, with the same bits.

    Args:
        gate_up: as for `silu_and_mul`.

    Returns:
        q: [..., I] int8 in -127..127, contiguous.
        scale: [..., 1] fp32, so that h is about q * scale.

    Raises:
        ValueError: the dtype, the shape or the stride of a row is wrong.
    """
    _check_gate_up(gate_up)
    q, scale = _silu_and_mul_quantize(gate_up.flatten(0, -2))
    leading = gate_up.shape[:-1]
    return q.view(*leading, gate_up.shape[-1] // 2), scale.view(*leading, 1)


def _check_gate_up(gate_up: torch.Tensor) -> None:
    check_rows("gate_up", gate_up, "2 * I")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have rows of an even width, gate then up, got shape {list(gate_up.shape)}")


@custom_op("silu_and_mul")
def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if use_triton(gate_up):
        from moe_int8.kernels.silu_mul_quantize import launch_silu_and_mul

        with torch.cuda.device_of(gate_up):
            return launch_silu_and_mul(gate_up)
    return silu_and_mul_ref(gate_up)


@_silu_and_mul.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@custom_op("silu_and_mul_quantize")
def _silu_and_mul_quantize(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if use_triton(gate_up):
        from moe_int8.kernels.silu_mul_quantize import launch_silu_and_mul_quantize

        with torch.cuda.device_of(gate_up):
            return launch_silu_and_mul_quantize(gate_up)
    return silu_and_mul_quantize_ref(gate_up)


@_silu_and_mul_quantize.register_fake
def _(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    M, K = gate_up.shape[0], gate_up.shape[1] // 2
    return gate_up.new_empty((M, K), dtype=torch.int8), gate_up.new_empty((M, 1), dtype=torch.float32)
