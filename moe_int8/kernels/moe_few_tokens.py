"""The fused MoE for a few tokens: two kernels, no sort of the slots, no scratch but the first GEMM's integer sums.

With so few slots nearly every one has an expert to itself, so a program takes a slot, not a block of them: all time
goes into reading weights. Both kernels multiply the weights' rows by one activation that fills 16 equal columns (the
least that the tensor cores take).

1. gate_up: quantizes its token's row, and multiplies a part of w13's rows by a part of K: exact int32 sums by split.
2. down: sums the splits, SwiGLU, quantizes, multiplies a part of w2's rows and sums over the token's experts.
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
from moe_int8.kernels.moe_align import local_expert
from moe_int8.tuning import FEW_TOKENS_TOPK, FewTokensConfig

COLUMNS = tl.constexpr(FEW_TOKENS_TOPK)


@triton.jit
def _gate_up_by_slot_kernel(
    x_ptr,  # codes, if there are scales
    x_scale_ptr,  # None: x is quantized here
    w13_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    sums_ptr,  # [SPLITS, num_slots, N] int32
    scale_ptr,  # [num_slots] fp32
    num_ids,
    num_experts,
    num_slots,
    topk,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    BLOCK_ROW: tl.constexpr,  # K, rounded up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,  # K of one program, a multiple of BLOCK_K
    OVERLAP: tl.constexpr,
):
    let_the_next_start(OVERLAP)
    slot = tl.program_id(0)
    block_n = tl.program_id(1)
    split = tl.program_id(2)
    token = (slot // topk).to(tl.int64)
    expert = local_expert(tl.load(topk_ids_ptr + slot), expert_map_ptr, num_ids, num_experts).to(tl.int64)
    if expert < 0:
        return
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = tl.minimum(offs_n, N - 1).to(tl.int64)
    offs_k = split * SPLIT_K + tl.arange(0, BLOCK_K)
    w_ptrs = w13_ptr + expert * stride_we + row_n[:, None] * stride_wn + offs_k[None, :]
    if SPLIT_K == BLOCK_K:  # all weights of this program are on their way while it quantizes
        w = tl.load(w_ptrs, mask=(offs_k < K)[None, :], other=0)
    x_ptr += token * stride_xm
    if x_scale_ptr is None:
        offs_row = tl.arange(0, BLOCK_ROW)
        row = tl.load(x_ptr + offs_row, mask=offs_row < K, other=0.0).to(tl.float32)
        amax = amax_from_bits(tl.max(abs_bits(row)))
        scale = scale_from_amax(amax)
    else:
        scale = tl.load(x_scale_ptr + token)
    if block_n == 0 and split == 0:
        tl.store(scale_ptr + slot, scale)

    sums = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.int32)
    for k in range(0, SPLIT_K, BLOCK_K):
        inside = offs_k < K - k
        if SPLIT_K > BLOCK_K:
            w = tl.load(w_ptrs, mask=inside[None, :], other=0)
        x = tl.load(x_ptr + offs_k + k, mask=inside, other=0)
        if x_scale_ptr is None:
            x = quantize_with_amax(x.to(tl.float32), amax)
        sums = tl.dot(w, tl.broadcast_to(x[:, None], (BLOCK_K, COLUMNS)), sums, out_dtype=tl.int32)
        w_ptrs += BLOCK_K
    one = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == 0, sums, 0), axis=1)
    tl.store(sums_ptr + (split * num_slots + slot).to(tl.int64) * N + offs_n, one, mask=offs_n < N)


@triton.jit
def _down_by_token_kernel(
    sums_ptr,
    scale_ptr,
    w13_scale_ptr,
    w2_ptr,
    w2_scale_ptr,
    topk_weights_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    y_ptr,
    num_ids,
    num_experts,
    num_slots,
    N,
    K,
    factor,
    stride_we,
    stride_wn,
    stride_ym,
    TOPK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    DTYPE: tl.constexpr,  # to which h and the experts' outputs are rounded
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    slots = token * TOPK + columns
    ids = tl.load(topk_ids_ptr + slots, mask=columns < TOPK, other=-1)
    experts = local_expert(ids, expert_map_ptr, num_ids, num_experts).to(tl.int64)

    # h of every slot, [BLOCK_K, COLUMNS]: each column is a slot's row.
    wait_for_the_previous(OVERLAP)
    offs_k = tl.arange(0, BLOCK_K)
    used = (experts >= 0)[None, :] & (offs_k < K)[:, None]
    gate = tl.zeros((BLOCK_K, COLUMNS), dtype=tl.int32)
    up = tl.zeros((BLOCK_K, COLUMNS), dtype=tl.int32)
    for split in range(SPLITS):
        ptrs = sums_ptr + (split * num_slots + slots)[None, :] * (2 * K) + offs_k[:, None]
        gate += tl.load(ptrs, mask=used, other=0)
        up += tl.load(ptrs + K, mask=used, other=0)
    scale = tl.load(scale_ptr + slots, mask=experts >= 0, other=1.0)[None, :]
    w13_scale_ptrs = w13_scale_ptr + experts[None, :] * (2 * K) + offs_k[:, None]
    gate_scaled = gate.to(tl.float32) * scale * tl.load(w13_scale_ptrs, mask=used, other=0.0)
    up_scaled = up.to(tl.float32) * scale * tl.load(w13_scale_ptrs + K, mask=used, other=0.0)
    h = swiglu(gate_scaled, up_scaled).to(DTYPE).to(tl.float32)
    h = tl.where(used, h, 0.0)
    amax = amax_from_bits(tl.max(abs_bits(h), axis=0))
    codes = quantize_with_amax(h, amax[None, :])
    h_scale = scale_from_amax(amax)

    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = tl.minimum(offs_n, N - 1).to(tl.int64)
    weight = tl.load(topk_weights_ptr + slots, mask=columns < TOPK, other=0.0)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for k in tl.range(TOPK, num_stages=STAGES):
        expert = tl.sum(tl.where(columns == k, experts, 0))
        inside = offs_k < tl.where(expert >= 0, K, 0)
        read = tl.maximum(expert, 0)
        w = tl.load(
            w2_ptr + read * stride_we + row_n[:, None] * stride_wn + offs_k[None, :], mask=inside[None, :], other=0
        )
        sums = tl.dot(w, codes, out_dtype=tl.int32)
        own = columns == k
        z = tl.sum(tl.where(own[None, :], sums, 0), axis=1).to(tl.float32)
        z = z * tl.sum(tl.where(own, h_scale, 0.0)) * tl.load(w2_scale_ptr + read * N + row_n)
        z = (z * tl.sum(tl.where(own, weight, 0.0))).to(DTYPE).to(tl.float32)
        total += tl.where(expert >= 0, z, 0.0)
    tl.store(y_ptr + token * stride_ym + offs_n, (total * factor).to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _down_at_once_kernel(
    sums_ptr,
    scale_ptr,
    w13_scale_ptr,
    w2_ptr,
    w2_scale_ptr,
    topk_weights_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    y_ptr,
    num_ids,
    num_experts,
    num_slots,
    N,
    K,
    factor,
    stride_we,
    stride_wn,
    stride_ym,
    TOPK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    DTYPE: tl.constexpr,  # to which h and the experts' outputs are rounded
    EXPERTS: tl.constexpr,  # TOPK, rounded up to a power of two
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    slots = token * TOPK + columns
    ids = tl.load(topk_ids_ptr + slots, mask=columns < TOPK, other=-1)
    experts = local_expert(ids, expert_map_ptr, num_ids, num_experts).to(tl.int64)

    # The rows of w2 of all of the token's experts, [EXPERTS * BLOCK_N, BLOCK_K], before anything that has to wait.
    offs_k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, EXPERTS * BLOCK_N)
    k = rows // BLOCK_N
    row_ids = tl.load(topk_ids_ptr + token * TOPK + k, mask=k < TOPK, other=-1)
    row_experts = local_expert(row_ids, expert_map_ptr, num_ids, num_experts).to(tl.int64)
    row_n = tl.minimum(tl.program_id(1) * BLOCK_N + rows % BLOCK_N, N - 1).to(tl.int64)
    w = tl.load(
        w2_ptr + row_experts[:, None] * stride_we + row_n[:, None] * stride_wn + offs_k[None, :],
        mask=(row_experts >= 0)[:, None] & (offs_k < K)[None, :],
        other=0,
    )
    w2_scale = tl.load(w2_scale_ptr + row_experts * N + row_n, mask=row_experts >= 0, other=0.0)
    wait_for_the_previous(OVERLAP)

    # h of every slot, [BLOCK_K, COLUMNS]: each column is a slot's row.
    used = (experts >= 0)[None, :] & (offs_k < K)[:, None]
    gate = tl.zeros((BLOCK_K, COLUMNS), dtype=tl.int32)
    up = tl.zeros((BLOCK_K, COLUMNS), dtype=tl.int32)
    for split in range(SPLITS):
        ptrs = sums_ptr + (split * num_slots + slots)[None, :] * (2 * K) + offs_k[:, None]
        gate += tl.load(ptrs, mask=used, other=0)
        up += tl.load(ptrs + K, mask=used, other=0)
    scale = tl.load(scale_ptr + slots, mask=experts >= 0, other=1.0)[None, :]
    w13_scale_ptrs = w13_scale_ptr + experts[None, :] * (2 * K) + offs_k[:, None]
    gate_scaled = gate.to(tl.float32) * scale * tl.load(w13_scale_ptrs, mask=used, other=0.0)
    up_scaled = up.to(tl.float32) * scale * tl.load(w13_scale_ptrs + K, mask=used, other=0.0)
    h = swiglu(gate_scaled, up_scaled).to(DTYPE).to(tl.float32)
    h = tl.where(used, h, 0.0)
    amax = amax_from_bits(tl.max(abs_bits(h), axis=0))
    codes = quantize_with_amax(h, amax[None, :])
    h_scale = scale_from_amax(amax)

    weight = tl.load(topk_weights_ptr + slots, mask=columns < TOPK, other=0.0)
    sums = tl.dot(w, codes, out_dtype=tl.int32)  # [EXPERTS * BLOCK_N, COLUMNS]; a row needs its own slot's column
    own = k[:, None] == columns[None, :]
    z = tl.sum(tl.where(own, sums, 0), axis=1).to(tl.float32)
    z = z * tl.sum(tl.where(own, h_scale[None, :], 0.0), axis=1) * w2_scale
    z = (z * tl.sum(tl.where(own, weight[None, :], 0.0), axis=1)).to(DTYPE).to(tl.float32)
    z = tl.reshape(z, (EXPERTS, BLOCK_N))
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for slot in tl.static_range(TOPK):
        total += tl.sum(tl.where((tl.arange(0, EXPERTS) == slot)[:, None], z, 0.0), axis=0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + token * stride_ym + offs_n, (total * factor).to(y_ptr.dtype.element_ty), mask=offs_n < N)


def launch_moe_few_tokens(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    factor: float,
    dtype: torch.dtype,
    config: FewTokensConfig,
    y: torch.Tensor,
) -> None:
    """Launch both kernels, with int32 accumulation.

    Args:
        x: [M, H], rows contiguous; int8 codes with x_scale [M] fp32 contiguous, else bf16, fp16 or fp32.
        w13: [E, 2I, H] int8, w2: [E, H, I] int8; rows contiguous.
        w13_scale: [E, 2I] fp32, w2_scale: [E, H] fp32; contiguous.
        topk_weights: [M, topk] fp32; topk_ids: [M, topk] int32 or int64; contiguous; topk at most 16.
        dtype: to which h and the experts' outputs are rounded.
        y: [M, H], written; rows contiguous, row stride free.
    """
    (M, topk), (E, H, inter) = topk_ids.shape, w2.shape
    num_slots, num_ids = M * topk, E if expert_map is None else expert_map.numel()
    split_k = config.split_k(H)
    splits = triton.cdiv(H, split_k)
    sums = torch.empty((splits, num_slots, 2 * inter), dtype=torch.int32, device=x.device)
    scale = torch.empty(num_slots, dtype=torch.float32, device=x.device)
    overlap = config.overlap and overlaps(x.device)
    _gate_up_by_slot_kernel[(num_slots, triton.cdiv(2 * inter, config.up_block_n), splits)](
        x,
        x_scale,
        w13,
        topk_ids,
        expert_map,
        sums,
        scale,
        num_ids,
        E,
        num_slots,
        topk,
        2 * inter,
        H,
        x.stride(0),
        w13.stride(0),
        w13.stride(1),
        BLOCK_ROW=triton.next_power_of_2(H),
        BLOCK_N=config.up_block_n,
        BLOCK_K=config.up_block_k,
        SPLIT_K=split_k,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    if config.at_once:
        down, options = (
            _down_at_once_kernel,
            {
                "EXPERTS": triton.next_power_of_2(topk),
                "num_warps": config.down_warps,
            },
        )
    else:
        down, options = _down_by_token_kernel, {"STAGES": config.num_stages, "num_warps": 4}
    down[(M, triton.cdiv(H, config.down_block_n))](
        sums,
        scale,
        w13_scale,
        w2,
        w2_scale,
        topk_weights,
        topk_ids,
        expert_map,
        y,
        num_ids,
        E,
        num_slots,
        H,
        inter,
        factor,
        w2.stride(0),
        w2.stride(1),
        y.stride(0),
        TOPK=topk,
        SPLITS=splits,
        BLOCK_N=config.down_block_n,
        BLOCK_K=max(triton.next_power_of_2(inter), 32),
        DTYPE=TRITON_DTYPES[dtype],
        OVERLAP=overlap,
        launch_pdl=overlap,
        **options,
        enable_fp_fusion=False,
    )
