"""Sort the (token, expert) slots by expert, each expert's share padded to whole blocks of rows (vLLM's layout).

A slot is token * topk + k. Without atomics, and stable: an expert's slots stay in ascending order, so the layout is
the same in every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK_SLOTS = 1024  # slots that one program looks at in a step


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


@triton.jit
def _count_kernel(topk_ids_ptr, expert_map_ptr, counts_ptr, num_ids, num_slots, num_experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_slots, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        ids = tl.load(topk_ids_ptr + slots, mask=slots < num_slots, other=-1)
        local = local_expert(ids, expert_map_ptr, num_ids, num_experts)
        count += (local == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count))


@triton.jit
def _scatter_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    counts_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    num_ids,
    num_slots,
    num_experts,
    EXPERTS: tl.constexpr,  # num_experts, rounded up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(experts < expert, blocks, 0))
    num_blocks = tl.sum(tl.where(experts == expert, blocks, 0))
    count = tl.sum(tl.where(experts == expert, counts, 0))
    if expert == 0:
        tl.store(num_tokens_post_padded_ptr, tl.sum(blocks) * BLOCK_M)
    for block in range(num_blocks):
        tl.store(expert_ids_ptr + first_block + block, expert)

    out_ptr = sorted_token_ids_ptr + first_block * BLOCK_M
    written = 0
    if count > 0:
        for start in range(0, num_slots, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            ids = tl.load(topk_ids_ptr + slots, mask=slots < num_slots, other=-1)
            local = local_expert(ids, expert_map_ptr, num_ids, num_experts)
            mine = (local == expert).to(tl.int32)
            tl.store(out_ptr + written + tl.cumsum(mine) - 1, slots, mask=mine == 1)
            written += tl.sum(mine)
    pad = count + tl.arange(0, BLOCK_M)
    tl.store(out_ptr + pad, num_slots, mask=pad < num_blocks * BLOCK_M)


def launch_moe_align(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_m: int
) -> Alignment:
    """Launch the sort.

    Args:
        topk_ids: [M, topk] int32 or int64, contiguous, M > 0; ids that are not local own no row.
        expert_map: [E_global] int32, the local expert or -1; None: ids are local, those out of range own no row.
        num_experts: E, the local experts.
        block_m: rows a block.
    """
    num_slots = topk_ids.numel()
    max_blocks = (num_slots + min(num_experts, num_slots) * (block_m - 1)) // block_m
    sizes = (max_blocks * block_m, max_blocks, 1, num_experts)
    *layout, counts = (torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in sizes)
    result = Alignment(*layout)
    num_ids = num_experts if expert_map is None else expert_map.numel()
    _count_kernel[(num_experts,)](topk_ids, expert_map, counts, num_ids, num_slots, num_experts, BLOCK=BLOCK_SLOTS)
    _scatter_kernel[(num_experts,)](
        topk_ids,
        expert_map,
        counts,
        *result,
        num_ids,
        num_slots,
        num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_M=block_m,
        BLOCK=BLOCK_SLOTS,
    )
    return result
