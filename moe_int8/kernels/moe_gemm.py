"""The two GEMMs of the fused MoE, over blocks of rows that share an expert (see moe_align).

The first GEMM reads activation scales by token and stores h = swiglu(gate, up) by slot. The second reads them by slot,
because each (token, expert) row of h was quantized on its own, and stores the expert's output times its routing weight.
"""

import torch
import triton
import triton.language as tl

from moe_int8.kernels.common import (
    TRITON_DTYPES,
    abs_bits,
    amax_from_bits,
    let_the_next_start,
    overlaps,
    quantize_with_amax,
    scale_from_amax,
    swiglu,
    wait_for_the_previous,
)
from moe_int8.kernels.gemm import grouped_order, int8_tile
from moe_int8.kernels.moe_align import Alignment
from moe_int8.kernels.quantize import launch_quantize_per_token
from moe_int8.tuning import LaunchConfig


@triton.jit(do_not_specialize=["max_blocks", "num_slots"])
def _moe_gate_up_kernel(
    q_ptr,
    scale_ptr,
    w13_ptr,
    w13_scale_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    h_ptr,  # codes of h, if there is a place for their scales
    h_scale_ptr,  # None: h is stored as it is
    max_blocks,
    num_slots,
    topk,
    N,
    K,
    stride_qm,
    stride_we,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    FP32_ACCUMULATE: tl.constexpr,
    OVERLAP: tl.constexpr,
    DTYPE: tl.constexpr,  # to which h is rounded
):
    let_the_next_start(OVERLAP)
    wait_for_the_previous(OVERLAP)
    block_m, block_n = grouped_order(tl.program_id(0), max_blocks, tl.cdiv(N, BLOCK_N), GROUP_M)
    if block_m * BLOCK_M >= tl.load(num_tokens_post_padded_ptr):
        return
    slot = tl.load(sorted_token_ids_ptr + block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    expert = tl.load(expert_ids_ptr + block_m).to(tl.int64)
    token = tl.where(slot < num_slots, slot, 0) // topk  # padding reads token 0 and is not stored

    # Gate and up rows take turns, so that a gate and its up value sit side by side in one thread.
    column = tl.arange(0, 2 * BLOCK_N)
    row_n = (column % 2) * N + tl.minimum(block_n * BLOCK_N + column // 2, N - 1)
    gate_up = int8_tile(
        q_ptr + token * stride_qm,
        w13_ptr + expert * stride_we + row_n.to(tl.int64) * stride_wn,
        K,
        BLOCK_M,
        2 * BLOCK_N,
        BLOCK_K,
        EVEN_K,
        FP32_ACCUMULATE,
    )
    gate_up = gate_up * tl.load(scale_ptr + token)[:, None] * tl.load(w13_scale_ptr + expert * 2 * N + row_n)[None, :]
    gate, up = tl.split(tl.reshape(gate_up, (BLOCK_M, BLOCK_N, 2)))
    h = swiglu(gate, up).to(DTYPE)

    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = (slot < num_slots)[:, None] & (offs_n < N)[None, :]
    if h_scale_ptr is not None:  # the tile holds whole rows
        h = tl.where((offs_n < N)[None, :], h.to(tl.float32), 0.0)
        amax = amax_from_bits(tl.max(abs_bits(h), axis=1))
        tl.store(h_scale_ptr + slot, scale_from_amax(amax), mask=slot < num_slots)
        h = quantize_with_amax(h, amax[:, None])
    tl.store(h_ptr + slot[:, None] * N + offs_n[None, :], h, mask=stored)


@triton.jit(do_not_specialize=["max_blocks", "num_slots"])
def _moe_down_kernel(
    q_ptr,
    scale_ptr,
    w2_ptr,
    w2_scale_ptr,
    topk_weights_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    y_ptr,
    max_blocks,
    num_slots,
    N,
    K,
    stride_we,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    FP32_ACCUMULATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_the_next_start(OVERLAP)
    wait_for_the_previous(OVERLAP)
    block_m, block_n = grouped_order(tl.program_id(0), max_blocks, tl.cdiv(N, BLOCK_N), GROUP_M)
    if block_m * BLOCK_M >= tl.load(num_tokens_post_padded_ptr):
        return
    slot = tl.load(sorted_token_ids_ptr + block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    expert = tl.load(expert_ids_ptr + block_m).to(tl.int64)
    row_m = tl.where(slot < num_slots, slot, 0)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = tl.minimum(offs_n, N - 1)
    y = int8_tile(
        q_ptr + row_m * K,
        w2_ptr + expert * stride_we + row_n.to(tl.int64) * stride_wn,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        FP32_ACCUMULATE,
    )
    y = y * tl.load(scale_ptr + row_m)[:, None] * tl.load(w2_scale_ptr + expert * N + row_n)[None, :]
    y = y * tl.load(topk_weights_ptr + row_m)[:, None]
    y_ptrs = y_ptr + slot[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(slot < num_slots)[:, None] & (offs_n < N)[None, :])


def launch_moe_gate_up(
    q: torch.Tensor,
    scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    alignment: Alignment,
    topk: int,
    dtype: torch.dtype,
    accumulator: str,
    config: LaunchConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch h[slot] = swiglu(gate, up) of the slot's token and expert, rounded to `dtype` and quantized.

    A tile that holds whole rows quantizes them itself; narrower ones store h, and a pass of its own quantizes it.

    Args:
        q: [M, H] int8, rows contiguous. scale: [M] fp32, contiguous, by token.
        w13: [E, 2I, H] int8, gate rows then up rows, each contiguous. w13_scale: [E, 2I] fp32, contiguous.
        alignment: of the M * topk slots, padded to config.block_m.

    Returns:
        codes [M * topk, I] int8, scale [M * topk] fp32; rows of slots that are not local are not initialized.
    """
    num_slots, N, K = q.shape[0] * topk, w13.shape[1] // 2, w13.shape[2]
    whole_rows = config.block_n >= N
    h = torch.empty((num_slots, N), dtype=torch.int8 if whole_rows else dtype, device=q.device)
    h_scale = torch.empty(num_slots, dtype=torch.float32, device=q.device) if whole_rows else None
    max_blocks = alignment.expert_ids.numel()
    _moe_gate_up_kernel[(max_blocks * triton.cdiv(N, config.block_n),)](
        q,
        scale,
        w13,
        w13_scale,
        *alignment,
        h,
        h_scale,
        max_blocks,
        num_slots,
        topk,
        N,
        K,
        q.stride(0),
        w13.stride(0),
        w13.stride(1),
        DTYPE=TRITON_DTYPES[dtype],
        **_options(config, K, accumulator, overlaps(q.device)),
    )
    if h_scale is None:
        h, h_scale = launch_quantize_per_token(h)
    return h, h_scale.view(-1)


def launch_moe_down(
    q: torch.Tensor,
    scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    alignment: Alignment,
    out_dtype: torch.dtype,
    accumulator: str,
    config: LaunchConfig,
) -> torch.Tensor:
    """Launch the second GEMM, times the routing weight.

    Args:
        q: [M * topk, I] int8, contiguous. scale: [M * topk] fp32, contiguous, by slot.
        w2: [E, H, I] int8, rows contiguous. w2_scale: [E, H] fp32, contiguous.
        topk_weights: [M, topk] fp32, contiguous.

    Returns:
        [M * topk, H] `out_dtype`; rows of slots that are not local are not initialized.
    """
    num_slots, N, K = q.shape[0], w2.shape[1], w2.shape[2]
    y = torch.empty((num_slots, N), dtype=out_dtype, device=q.device)
    max_blocks = alignment.expert_ids.numel()
    _moe_down_kernel[(max_blocks * triton.cdiv(N, config.block_n),)](
        q,
        scale,
        w2,
        w2_scale,
        topk_weights,
        *alignment,
        y,
        max_blocks,
        num_slots,
        N,
        K,
        w2.stride(0),
        w2.stride(1),
        **_options(config, K, accumulator, overlaps(q.device)),
    )
    return y


def _options(config: LaunchConfig, K: int, accumulator: str, overlap: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "EVEN_K": K % config.block_k == 0,
        "FP32_ACCUMULATE": accumulator == "fp32",
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,  # every scaling rounds on its own
    }
