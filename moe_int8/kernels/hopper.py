"""What the Gluon kernels for Hopper share: names that differ between Triton versions, and twins of `common`."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_int8.kernels import common, moe_align

# The names are those of Triton 3.9; 3.6 has the same under older ones.
load_weight = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

swiglu = gluon.jit(common.swiglu.fn)
abs_bits = gluon.jit(common.abs_bits.fn)
amax_from_bits = gluon.jit(common.amax_from_bits.fn)
round_half_even = gluon.jit(common.round_half_even.fn)
quantize_with_amax = gluon.jit(common.quantize_with_amax.fn)
scale_from_amax = gluon.jit(common.scale_from_amax.fn)
local_expert = gluon.jit(moe_align.local_expert.fn)

BLOCK_K = gl.constexpr(128)  # codes of a row of shared memory: its swizzle in bytes


def weight_descriptor(weight: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Tiles [block_n, BLOCK_K] of [E, N, K] weights whose experts lie one behind the other."""
    E, N, K = weight.shape
    codes = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_K.value, element_bitwidth=8, rank=2)
    return TensorDescriptor(weight, [E * N, K], [weight.stride(1), 1], [block_n, BLOCK_K.value], codes)
