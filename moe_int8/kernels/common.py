"""What several kernels share: rounding, the quantiser of one row and SwiGLU, each the twin of a torch definition.

Their bits are part of the numeric contract, so the kernels that call them launch with `enable_fp_fusion=False`:
otherwise a product and the addition after it become one fused operation, which rounds once instead of twice.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_int8 import numerics
from moe_int8.dispatch import INTERPRETED

CODE_MAX = tl.constexpr(float(numerics.CODE_MAX))
STEP = tl.constexpr(numerics.STEP)
MIN_AMAX = tl.constexpr(numerics.MIN_AMAX)
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
ROUND_TO_INTEGER = tl.constexpr(1.5 * 2**23)  # fp32 numbers of this size are integers apart


@triton.jit
def round_half_even(x):
    """The nearest integer of an fp32 |x| < 2^22, ties to even: the twin of torch.round."""
    return (x + ROUND_TO_INTEGER) - ROUND_TO_INTEGER


@triton.jit
def abs_bits(x):
    """|x| of fp32 as the int32 that orders alike: NaN is above Inf, where a floating-point maximum would drop it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_from_bits(bits):
    """The fp32 amax of a row from the maximum of its `abs_bits`, not below MIN_AMAX; NaN stays NaN."""
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(amax < MIN_AMAX, MIN_AMAX, amax)


@triton.jit
def quantize_with_amax(x, amax):
    """The int8 codes of fp32 values whose row has this amax; a row that is not finite has zero codes."""
    q = round_half_even(x * tl.div_rn(CODE_MAX, amax))
    return tl.where(amax < float("inf"), q, 0.0).to(tl.int8)


@triton.jit
def scale_from_amax(amax):
    """The fp32 scale of a row: x is about q * scale."""
    return amax * STEP


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up in fp32, the twin of moe_int8.activation.swiglu."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@cache
def overlaps(device: torch.device) -> bool:
    """Whether the next kernel of an operator may be launched while one still runs (programmatic dependent launch).

    Such a kernel has `launch_pdl=True` and calls `wait_for_the_previous` before it reads or writes what others write.
    Every program of every kernel in between waits as well, so what came before the previous kernel is done, too.
    """
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_the_next_start(OVERLAP: tl.constexpr):
    """Let the next kernel's programs take the place that this one leaves free."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_the_previous(OVERLAP: tl.constexpr):
    """Wait until the kernel before is done and what it stored can be seen."""
    if OVERLAP:
        gdc_wait()
