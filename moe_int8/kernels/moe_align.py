"""Sort the (token, expert) slots by expert, each expert's share padded to whole blocks of rows (vLLM's layout).

A slot is token * topk + k. Without atomics, and stable: an expert's slots stay in ascending order, so the layout is
the same in every run. Two launches: count each expert's slots in every chunk of slots, then place them: a slot's row is
where its expert's rows begin, plus those of the chunks before, plus its rank in its chunk. The rows of x are quantized
beside the counting, which saves a launch of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_int8.kernels.common import (
    abs_bits,
    amax_from_bits,
    let_the_next_start,
    overlaps,
    quantize_with_amax,
    scale_from_amax,
    wait_for_the_previous,
)

CHUNK = 256  # slots of a program
BLOCK_SLOTS = tl.constexpr(32)  # slots that a program compares its own with at a time
BLOCK_TABLE = 16384  # counts that a program reads at a time


class Alignment(NamedTuple):
    """Which slots each block of rows multiplies, and by which expert."""

    sorted_token_ids: torch.Tensor  # [blocks * block_m] int32: slots by expert; padding is the number of slots
    expert_ids: torch.Tensor  # [blocks] int32
    num_tokens_post_padded: torch.Tensor  # [1] int32: the rows in use; what lies behind them is not initialized


@triton.jit
def local_expert(ids, expert_map_ptr, num_ids, num_experts):
    """The local expert of each routed id; -1 for an id out of [0, num_ids) or not on this rank."""
    local = tl.where((ids >= 0) & (ids < num_ids), ids, -1)
    if expert_map_ptr is not None:
        local = tl.load(expert_map_ptr + local, mask=local >= 0, other=-1)
    return tl.where((local >= 0) & (local < num_experts), local, -1).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "num_chunks"])
def _quantize_and_count_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    counts_ptr,  # [num_chunks, num_experts]
    num_ids,
    num_slots,
    num_experts,
    num_chunks,
    K,
    stride_xm,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,  # num_experts, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    OVERLAP: tl.constexpr,
):
    let_the_next_start(OVERLAP)
    chunk = tl.program_id(0)
    if chunk >= num_chunks:
        m = (chunk - num_chunks).to(tl.int64)
        offs_k = tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + m * stride_xm + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
        amax = amax_from_bits(tl.max(abs_bits(x)))
        tl.store(q_ptr + m * K + offs_k, quantize_with_amax(x, amax), mask=offs_k < K)
        tl.store(scale_ptr + m, scale_from_amax(amax))
        return
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(topk_ids_ptr + slots, mask=slots < num_slots, other=-1)
    local = local_expert(ids, expert_map_ptr, num_ids, num_experts)
    counts = tl.histogram(tl.maximum(local, 0), EXPERTS, mask=local >= 0)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + chunk * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_slots", "num_chunks"])
def _place_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    counts_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    num_ids,
    num_slots,
    num_experts,
    num_chunks,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,  # chunks whose counts are read at a time
    OVERLAP: tl.constexpr,
):
    let_the_next_start(OVERLAP)
    wait_for_the_previous(OVERLAP)
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    count = tl.zeros((EXPERTS,), dtype=tl.int32)
    count_before = tl.zeros((EXPERTS,), dtype=tl.int32)  # in the chunks before this one
    for start in range(0, num_chunks, BLOCK_CHUNKS):
        chunks = start + tl.arange(0, BLOCK_CHUNKS)
        inside = (chunks < num_chunks)[:, None] & (experts < num_experts)[None, :]
        counts = tl.load(counts_ptr + chunks[:, None] * num_experts + experts[None, :], mask=inside, other=0)
        count += tl.sum(counts, axis=0)
        count_before += tl.sum(tl.where((chunks < chunk)[:, None], counts, 0), axis=0)
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    first_block = tl.cumsum(blocks) - blocks

    if chunk == num_chunks:  # one more program: what belongs to no slot
        tl.store(num_tokens_post_padded_ptr, tl.sum(blocks) * BLOCK_M)
        for block in range(tl.max(blocks)):
            tl.store(expert_ids_ptr + first_block + block, experts, mask=block < blocks)
        pad_ptrs = sorted_token_ids_ptr + first_block * BLOCK_M + count
        for pad in range(BLOCK_M - 1):
            tl.store(pad_ptrs + pad, num_slots, mask=count + pad < blocks * BLOCK_M)
        return

    offs = tl.arange(0, CHUNK)
    slots = chunk * CHUNK + offs
    ids = tl.load(topk_ids_ptr + slots, mask=slots < num_slots, other=-1)
    local = local_expert(ids, expert_map_ptr, num_ids, num_experts)
    rank = tl.zeros((CHUNK,), dtype=tl.int32)  # of a slot among its expert's in this chunk
    for start in range(0, CHUNK, BLOCK_SLOTS):
        other_offs = start + tl.arange(0, BLOCK_SLOTS)
        other_slots = chunk * CHUNK + other_offs
        other_ids = tl.load(topk_ids_ptr + other_slots, mask=other_slots < num_slots, other=-1)
        other = local_expert(other_ids, expert_map_ptr, num_ids, num_experts)
        ahead = (other[None, :] == local[:, None]) & (other_offs[None, :] < offs[:, None])
        rank += tl.sum(ahead.to(tl.int32), axis=1)
    first_row = tl.gather(first_block * BLOCK_M + count_before, tl.maximum(local, 0), axis=0)
    tl.store(sorted_token_ids_ptr + first_row + rank, slots, mask=local >= 0)


def launch_moe_align(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    block_m: int,
) -> tuple[torch.Tensor, torch.Tensor, Alignment]:
    """Launch the sort, and quantize x if it has no scales yet.

    Args:
        x: [M, H], M > 0, rows contiguous; int8 codes with x_scale [M] fp32, else bf16, fp16 or fp32.
        topk_ids: [M, topk] int32 or int64, contiguous; ids that are not local own no row.
        expert_map: [E_global] int32, the local expert or -1; None: ids are local, those out of range own no row.
        num_experts: E, the local experts.
        block_m: rows a block.

    Returns:
        codes [M, H] int8, scale [M] fp32, the alignment.
    """
    (M, H), num_slots = x.shape, topk_ids.numel()
    if x_scale is None:
        q = torch.empty((M, H), dtype=torch.int8, device=x.device)
        scale = torch.empty(M, dtype=torch.float32, device=x.device)
    else:
        q, scale = x, x_scale
    num_chunks = triton.cdiv(num_slots, CHUNK)
    max_blocks = (num_slots + min(num_experts, num_slots) * (block_m - 1)) // block_m
    sizes = (max_blocks * block_m, max_blocks, 1, num_chunks * num_experts)
    *layout, counts = (torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in sizes)
    alignment = Alignment(*layout)
    num_ids = num_experts if expert_map is None else expert_map.numel()
    experts = triton.next_power_of_2(num_experts)
    overlap = overlaps(x.device)
    _quantize_and_count_kernel[(num_chunks + (M if x_scale is None else 0),)](
        x,
        q,
        scale,
        topk_ids,
        expert_map,
        counts,
        num_ids,
        num_slots,
        num_experts,
        num_chunks,
        H,
        x.stride(0),
        CHUNK=CHUNK,
        EXPERTS=experts,
        BLOCK_K=triton.next_power_of_2(H),
        OVERLAP=overlap,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _place_kernel[(num_chunks + 1,)](
        topk_ids,
        expert_map,
        counts,
        *alignment,
        num_ids,
        num_slots,
        num_experts,
        num_chunks,
        CHUNK=CHUNK,
        EXPERTS=experts,
        BLOCK_M=block_m,
        BLOCK_CHUNKS=max(BLOCK_TABLE // experts, 1),
        OVERLAP=overlap,
        num_warps=8,
        launch_pdl=overlap,
    )
    return q, scale, alignment
