"""The second GEMM of the fused MoE and the sum over a token's experts for Hopper, in one pass over slices of H.

The experts' outputs z are M * topk * H values: written and read back whole they take longer than the arithmetic. Here
they live in a few buffers of one slice of columns each, small enough to stay in the L2 cache. All programs run at once
(a cooperative launch) and walk through the slices together:

    step s: multiply this program's tiles of slice s, then sum this program's tokens of slice s - 1.

A program keeps the rows of its tiles in shared memory throughout; w2 passes by once.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_int8.kernels.hopper import BLOCK_K, barrier, load_rows, load_weight, local_expert, weight_descriptor
from moe_int8.kernels.moe_align import Alignment

BLOCK_M = 64  # what four warps multiply at once


@gluon.jit
def _wait_for(counter_ptr, count):
    while gl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < count:
        pass


@gluon.jit
def _done(counter_ptr):
    barrier()  # every thread's loads and stores come before
    gl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def _first_row(step, mine, expert_ids_ptr, N, SLICE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The row of w2 [E * N, K] at which the tile of this program's step begins."""
    tile = gl.program_id(0) + step % mine * gl.num_programs(0)
    TILES_N: gl.constexpr = SLICE // BLOCK_N
    expert = gl.load(expert_ids_ptr + tile // TILES_N)
    return expert * N + step // mine * SLICE + tile % TILES_N * BLOCK_N


@gluon.jit
def _load_w2(step, num_steps, mine, expert_ids_ptr, w2_desc, w2_buffers, full, N, SLICE: gl.constexpr):
    STAGES: gl.constexpr = full.type.shape[0]
    PARTS: gl.constexpr = w2_buffers.type.shape[0] // STAGES
    BLOCK_N: gl.constexpr = w2_buffers.type.shape[1]
    if step < num_steps:
        stage = step % STAGES
        row = _first_row(step, mine, expert_ids_ptr, N, SLICE, BLOCK_N)
        mbarrier.expect(full.index(stage), PARTS * BLOCK_N * BLOCK_K)
        for part in gl.static_range(PARTS):
            load_weight(w2_desc, [row, part * BLOCK_K], full.index(stage), w2_buffers.index(stage * PARTS + part))


@gluon.jit(do_not_specialize=["num_slots"])
def _moe_down_hopper_kernel(
    q_ptr,
    scale_ptr,
    w2_desc,  # [E * N, K] in tiles [BLOCK_N, BLOCK_K]
    w2_scale_ptr,
    topk_weights_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    z_ptr,  # [BUFFERS, num_slots, SLICE]
    y_ptr,
    counters_ptr,  # zeros: for each slice the programs that have multiplied it, then those that have summed it
    num_ids,
    num_experts,
    num_slots,
    N,
    factor,
    stride_ym,
    TOPK: gl.constexpr,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr,  # tokens summed at a time
    SLICE: gl.constexpr,
    TILES: gl.constexpr,  # most tiles of a slice that a program has
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = K // BLOCK_K
    TILES_N: gl.constexpr = SLICE // BLOCK_N
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 32])
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_K, element_bitwidth=8, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [WARPS, 1], [1, 0])
    SUM: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    q_buffers = gl.allocate_shared_memory(gl.int8, [TILES * PARTS, BLOCK_M, BLOCK_K], CODES)
    w2_buffers = gl.allocate_shared_memory(gl.int8, [STAGES * PARTS, BLOCK_N, BLOCK_K], CODES)
    slots = gl.allocate_shared_memory(gl.int32, [TILES, BLOCK_M], FLAT)
    scales = gl.allocate_shared_memory(gl.float32, [TILES, BLOCK_M], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [TILES, BLOCK_M], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(STAGES):
        mbarrier.init(full.index(buffer), count=1)

    program, programs = gl.program_id(0), gl.num_programs(0)
    num_slices = N // SLICE
    mine = gl.cdiv(gl.load(num_tokens_post_padded_ptr) // BLOCK_M * TILES_N - program, programs)
    num_steps = num_slices * mine
    for ahead in gl.static_range(STAGES - 1):
        _load_w2(ahead, num_steps, mine, expert_ids_ptr, w2_desc, w2_buffers, full, N, SLICE)
    for i in range(mine):
        rows_ptr = sorted_token_ids_ptr + (program + i * programs) // TILES_N * BLOCK_M
        slot = gl.load(rows_ptr + gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS)))
        row = gl.where(slot < num_slots, slot, 0).to(gl.int64)
        q_rows = q_ptr + row[:, None] * K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, ROWS))[None, :]
        for part in gl.static_range(PARTS):
            load_rows(q_buffers.index(i * PARTS + part), q_rows + part * BLOCK_K)
        slot = gl.load(rows_ptr + gl.arange(0, BLOCK_M, ROW))
        row = gl.where(slot < num_slots, slot, 0)
        slots.index(i).store(slot)
        scales.index(i).store(gl.load(scale_ptr + row))
        weights.index(i).store(gl.load(topk_weights_ptr + row))
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()

    for s in range(num_slices + 1):
        if s < num_slices:
            if s >= BUFFERS:
                _wait_for(counters_ptr + num_slices + s - BUFFERS, programs)
            z_slice_ptr = z_ptr + (s % BUFFERS) * num_slots.to(gl.int64) * SLICE
            for i in range(mine):
                step = s * mine + i
                stage = step % STAGES
                barrier()  # no warp multiplies the step before any more: its buffer is free
                _load_w2(step + STAGES - 1, num_steps, mine, expert_ids_ptr, w2_desc, w2_buffers, full, N, SLICE)
                w2_row = _first_row(step, mine, expert_ids_ptr, N, SLICE, BLOCK_N)
                w2_scale = gl.load(w2_scale_ptr + w2_row + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SUMS)))
                mbarrier.wait(full.index(stage), step // STAGES % 2)
                sums = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, SUMS)
                for part in gl.static_range(PARTS):
                    w2 = w2_buffers.index(stage * PARTS + part).permute((1, 0))
                    sums = warpgroup_mma(q_buffers.index(i * PARTS + part), w2, sums, use_acc=part > 0, is_async=True)
                sums = warpgroup_mma_wait(0, (sums,))
                z = sums.to(gl.float32) * scales.index(i).load(gl.SliceLayout(1, SUMS))[:, None] * w2_scale[None, :]
                z = z * weights.index(i).load(gl.SliceLayout(1, SUMS))[:, None]
                z = gl.convert_layout(z.to(z_ptr.dtype.element_ty), STORE)
                slot = slots.index(i).load(gl.SliceLayout(1, STORE))
                offs_n = (program + i * programs) % TILES_N * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORE))
                z_ptrs = z_slice_ptr + slot.to(gl.int64)[:, None] * SLICE + offs_n[None, :]
                gl.store(z_ptrs, z, mask=(slot < num_slots)[:, None])
            _done(counters_ptr + s)
        if s >= 1:
            z_slice_ptr = z_ptr + ((s - 1) % BUFFERS) * num_slots.to(gl.int64) * SLICE
            num_tokens = num_slots // TOPK
            offs_n = gl.arange(0, SLICE, gl.SliceLayout(0, SUM))
            _wait_for(counters_ptr + s - 1, programs)
            for first in range(program * BLOCK_T, num_tokens, programs * BLOCK_T):
                tokens = first + gl.arange(0, BLOCK_T, gl.SliceLayout(1, SUM))
                total = gl.zeros((BLOCK_T, SLICE), gl.float32, SUM)
                for k in gl.static_range(TOPK):
                    slot = tokens.to(gl.int64) * TOPK + k
                    ids = gl.load(topk_ids_ptr + slot, mask=tokens < num_tokens, other=-1)
                    local = local_expert(ids, expert_map_ptr, num_ids, num_experts)
                    z_ptrs = z_slice_ptr + slot[:, None] * SLICE + offs_n[None, :]
                    # Not through the L1 cache: it may hold what an earlier slice had here.
                    z = gl.load(z_ptrs, mask=(local >= 0)[:, None], other=0.0, cache_modifier=".cg")
                    total += z.to(gl.float32)
                y_ptrs = y_ptr + tokens.to(gl.int64)[:, None] * stride_ym + ((s - 1) * SLICE + offs_n)[None, :]
                y = (total * factor).to(y_ptr.dtype.element_ty)
                gl.store(y_ptrs, y, mask=(tokens < num_tokens)[:, None], cache_modifier=".cs")
            _done(counters_ptr + num_slices + s - 1)


def launch_moe_down_hopper(
    q: torch.Tensor,
    scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    alignment: Alignment,
    factor: float,
    dtype: torch.dtype,
    slice: int,
    block_n: int,
    block_t: int,
    tiles: int,
    stages: int,
    buffers: int,
    programs: int,
    y: torch.Tensor,
) -> None:
    """Draft."""
    (M, topk), (E, H, inter) = topk_ids.shape, w2.shape
    num_slots = M * topk
    assert triton.cdiv(alignment.expert_ids.numel() * (slice // block_n), programs) <= tiles
    z = torch.empty((buffers, num_slots, slice), dtype=dtype, device=q.device)
    counters = torch.zeros(2 * (H // slice), dtype=torch.int32, device=q.device)
    _moe_down_hopper_kernel[(programs,)](
        q,
        scale,
        weight_descriptor(w2, block_n),
        w2_scale,
        topk_weights,
        topk_ids,
        expert_map,
        *alignment,
        z,
        y,
        counters,
        E if expert_map is None else expert_map.numel(),
        E,
        num_slots,
        H,
        factor,
        y.stride(0),
        TOPK=topk,
        K=inter,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        SLICE=slice,
        TILES=tiles,
        STAGES=stages,
        BUFFERS=buffers,
        num_warps=4,
        launch_cooperative_grid=True,
        enable_fp_fusion=False,
    )
