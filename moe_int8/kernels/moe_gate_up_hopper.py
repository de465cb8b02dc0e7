"""The first GEMM of the fused MoE for Hopper and many tokens, in Gluon, with the bits of moe_int8.kernels.moe_gemm.

Triton's own pipeliner waits for every int8 wgmma before the next. Here one stays in flight. Weights arrive by TMA; the
rows of a block lie anywhere, so they are gathered with cp.async.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_int8.kernels.common import TRITON_DTYPES
from moe_int8.kernels.hopper import (
    BLOCK_K,
    abs_bits,
    amax_from_bits,
    barrier,
    load_rows,
    load_weight,
    quantize_with_amax,
    scale_from_amax,
    swiglu,
    weight_descriptor,
)
from moe_int8.kernels.moe_align import Alignment
from moe_int8.kernels.quantize import launch_quantize_per_token

BLOCK_N = gl.constexpr(128)  # weight rows of a TMA tile


@gluon.jit
def _load_step(
    step,
    num_steps,
    q_rows,  # [BLOCK_M, BLOCK_K] pointers
    w13_desc,
    gate_row,
    up_row,
    q_buffers,
    gate_buffers,
    up_buffers,
    full,
):
    """Ask for the operands of K step `step` and commit a group, an empty one behind the last step."""
    STAGES: gl.constexpr = q_buffers.type.shape[0]
    if step < num_steps:
        stage = step % STAGES
        k = step * BLOCK_K
        mbarrier.expect(full.index(stage), 2 * BLOCK_N * BLOCK_K)
        load_weight(w13_desc, [gate_row, k], full.index(stage), gate_buffers.index(stage))
        load_weight(w13_desc, [up_row, k], full.index(stage), up_buffers.index(stage))
        load_rows(q_buffers.index(stage), q_rows + k)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["num_slots"])
def _moe_gate_up_hopper_kernel(
    q_ptr,
    scale_ptr,
    w13_desc,  # [E * 2N, K] in tiles [BLOCK_N, BLOCK_K]
    w13_scale_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    h_ptr,  # codes of h, if WHOLE_ROWS
    h_scale_ptr,
    num_slots,
    topk,
    N,
    K,
    stride_qm,
    WHOLE_ROWS: gl.constexpr,  # N == BLOCK_N: rows are quantized here
    DTYPE: gl.constexpr,  # to which h is rounded
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    num_n = N // BLOCK_N
    block_m = gl.program_id(0) // num_n
    block_n = gl.program_id(0) % num_n
    if block_m * BLOCK_M >= gl.load(num_tokens_post_padded_ptr):
        return
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 32])
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_K, element_bitwidth=8, rank=2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    q_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], CODES)
    gate_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], CODES)
    up_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, BLOCK_K], CODES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(STAGES):
        mbarrier.init(full.index(buffer), count=1)

    expert = gl.load(expert_ids_ptr + block_m)
    gate_row = expert * 2 * N + block_n * BLOCK_N
    up_row = gate_row + N
    sorted_token_ids_ptr += block_m * BLOCK_M
    slot = gl.load(sorted_token_ids_ptr + gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS)))
    token = gl.where(slot < num_slots, slot, 0) // topk  # padding reads token 0 and is not stored
    offs_k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, ROWS))
    q_rows = q_ptr + token.to(gl.int64)[:, None] * stride_qm + offs_k[None, :]

    num_steps = K // BLOCK_K
    gate = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, SUMS)
    up = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, SUMS)
    for ahead in gl.static_range(STAGES - 2):
        _load_step(ahead, num_steps, q_rows, w13_desc, gate_row, up_row, q_buffers, gate_buffers, up_buffers, full)
    for step in range(num_steps):
        stage = step % STAGES
        async_copy.wait_group(STAGES - 3)
        mbarrier.wait(full.index(stage), step // STAGES % 2)
        fence_async_shared()
        # From here on every warp's rows have arrived, and no warp multiplies step - 2 any more: its buffers are free.
        barrier()
        gate = warpgroup_mma(
            q_buffers.index(stage), gate_buffers.index(stage).permute((1, 0)), gate, use_acc=step > 0, is_async=True
        )
        up = warpgroup_mma(
            q_buffers.index(stage), up_buffers.index(stage).permute((1, 0)), up, use_acc=step > 0, is_async=True
        )
        _load_step(
            step + STAGES - 2,
            num_steps,
            q_rows,
            w13_desc,
            gate_row,
            up_row,
            q_buffers,
            gate_buffers,
            up_buffers,
            full,
        )
        gate, up = warpgroup_mma_wait(2, (gate, up))
    gate, up = warpgroup_mma_wait(0, (gate, up))

    slot = gl.load(sorted_token_ids_ptr + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS)))
    token = gl.where(slot < num_slots, slot, 0) // topk
    scale = gl.load(scale_ptr + token)[:, None]
    w13_scale_ptrs = w13_scale_ptr + gate_row.to(gl.int64) + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SUMS))
    gate = gate.to(gl.float32) * scale * gl.load(w13_scale_ptrs)[None, :]
    up = up.to(gl.float32) * scale * gl.load(w13_scale_ptrs + N)[None, :]
    h = swiglu(gate, up).to(DTYPE)
    if WHOLE_ROWS:
        h = h.to(gl.float32)
        amax = amax_from_bits(gl.max(abs_bits(h), axis=1))
        gl.store(h_scale_ptr + slot, scale_from_amax(amax), mask=slot < num_slots)
        h = quantize_with_amax(h, amax[:, None])
    STORE: gl.constexpr = ROWS if WHOLE_ROWS else gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    slot = gl.load(sorted_token_ids_ptr + gl.arange(0, BLOCK_M, gl.SliceLayout(1, STORE))).to(gl.int64)
    offs_n = block_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORE))
    h_ptrs = h_ptr + slot[:, None] * N + offs_n[None, :]
    gl.store(h_ptrs, gl.convert_layout(h, STORE), mask=(slot < num_slots)[:, None])


def launch_moe_gate_up_hopper(
    q: torch.Tensor,
    scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    alignment: Alignment,
    topk: int,
    dtype: torch.dtype,
    block_m: int,
    stages: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As moe_int8.kernels.moe_gemm.launch_moe_gate_up, with exact int32 sums.

    Args:
        block_m: rows of a block, 64 (four warps) or 128 (eight).
        stages: buffers of shared memory, each of (block_m + 256) * 128 bytes.
    """
    num_slots, N, K = q.shape[0] * topk, w13.shape[1] // 2, w13.shape[2]
    whole_rows = BLOCK_N.value == N
    h = torch.empty((num_slots, N), dtype=torch.int8 if whole_rows else dtype, device=q.device)
    h_scale = torch.empty(num_slots, dtype=torch.float32, device=q.device)
    _moe_gate_up_hopper_kernel[(alignment.expert_ids.numel() * (N // BLOCK_N.value),)](
        q,
        scale,
        weight_descriptor(w13, BLOCK_N.value),
        w13_scale,
        *alignment,
        h,
        h_scale,
        num_slots,
        topk,
        N,
        K,
        q.stride(0),
        WHOLE_ROWS=whole_rows,
        DTYPE=TRITON_DTYPES[dtype],
        BLOCK_M=block_m,
        STAGES=stages,
        num_warps=block_m // 16,
        enable_fp_fusion=False,
    )
    if not whole_rows:
        h, h_scale = launch_quantize_per_token(h)
    return h, h_scale.view(-1)
