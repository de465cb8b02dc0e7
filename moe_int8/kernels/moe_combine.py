"""Sum of a token's expert outputs: y[m] = (sum_k of experts_out[m, k], in the order of k, in fp32) * factor."""

import torch
import triton
import triton.language as tl

from moe_int8.kernels.common import overlaps, wait_for_the_previous
from moe_int8.kernels.moe_align import local_expert

BLOCK_H = 1024


@triton.jit
def _moe_combine_kernel(
    experts_out_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    y_ptr,
    num_ids,
    num_experts,
    H,
    factor,
    stride_ym,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_the_previous(OVERLAP)
    m = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        slot = m * TOPK + k
        local = local_expert(tl.load(topk_ids_ptr + slot), expert_map_ptr, num_ids, num_experts)
        width = tl.where(local >= 0, H, 0)  # nobody wrote the row of a slot that is not local: it is not read either
        row = tl.load(experts_out_ptr + slot * H + offs_h, mask=offs_h < width, other=0.0)
        total += row.to(tl.float32)
    tl.store(y_ptr + m * stride_ym + offs_h, (total * factor).to(y_ptr.dtype.element_ty), mask=offs_h < H)


def launch_moe_combine(
    experts_out: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    factor: float,
    y: torch.Tensor,
) -> None:
    """Launch the sum.

    Args:
        experts_out: [M * topk, H], contiguous: expert outputs by slot, already times their routing weights.
        topk_ids, expert_map, num_experts: as in `launch_moe_align`, which decides which slots have a row.
        factor: multiplies the sum, before the one cast to y's dtype.
        y: [M, H], written; rows contiguous, row stride free.
    """
    (M, topk), H = topk_ids.shape, experts_out.shape[1]
    num_ids = num_experts if expert_map is None else expert_map.numel()
    overlap = overlaps(y.device)
    _moe_combine_kernel[(M, triton.cdiv(H, BLOCK_H))](
        experts_out,
        topk_ids,
        expert_map,
        y,
        num_ids,
        num_experts,
        H,
        factor,
        y.stride(0),
        TOPK=topk,
        BLOCK=BLOCK_H,
        OVERLAP=overlap,
        launch_pdl=overlap,
        enable_fp_fusion=False,
    )
