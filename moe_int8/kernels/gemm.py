"""Dense w8a8 GEMM: y[m, n] = sum_k q[m, k] * weight[n, k], as fp32, * scale[m] * weight_scale[n] (+ bias[n]).

Also the two helpers that the expert GEMMs share: the K loop and the order in which programs take tiles.
"""

import torch
import triton
import triton.language as tl

from moe_int8.tuning import LaunchConfig


@triton.jit
def grouped_order(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """Tile (m, n) of program `pid`: GROUP_M row blocks walk the columns together, so that both operands stay in L2."""
    in_group = GROUP_M * num_n
    first_m = pid // in_group * GROUP_M
    size_m = min(num_m - first_m, GROUP_M)
    return first_m + pid % in_group % size_m, pid % in_group // size_m


@triton.jit
def int8_tile(
    a_rows,  # [BLOCK_M] pointers to the rows of A
    b_rows,  # [BLOCK_N] pointers to the rows of B
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # K % BLOCK_K == 0
    FP32_ACCUMULATE: tl.constexpr,
):
    """A @ B.T of one tile as fp32: the exact int32 sum, converted once, or with FP32_ACCUMULATE once per BLOCK_K.

    Two half-sized dots an iteration: with one, Triton 3.9 carries the int8 operands over the loop edge on sm_80 and
    sm_89 byte by byte, and shuffling them costs more than the multiplication.
    """
    HALF_K: tl.constexpr = BLOCK_K // 2
    offs_k = tl.arange(0, HALF_K)
    a_ptrs = a_rows[:, None] + offs_k[None, :]  # [BLOCK_M, HALF_K]
    b_ptrs = b_rows[None, :] + offs_k[:, None]  # [HALF_K, BLOCK_N]
    if FP32_ACCUMULATE:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a_low = tl.load(a_ptrs)
            b_low = tl.load(b_ptrs)
            a_high = tl.load(a_ptrs + HALF_K)
            b_high = tl.load(b_ptrs + HALF_K)
        else:
            low = offs_k < K - k
            high = offs_k < K - k - HALF_K
            a_low = tl.load(a_ptrs, mask=low[None, :], other=0)
            b_low = tl.load(b_ptrs, mask=low[:, None], other=0)
            a_high = tl.load(a_ptrs + HALF_K, mask=high[None, :], other=0)
            b_high = tl.load(b_ptrs + HALF_K, mask=high[:, None], other=0)
        if FP32_ACCUMULATE:
            part = tl.dot(a_low, b_low, out_dtype=tl.int32)
            total += tl.dot(a_high, b_high, part, out_dtype=tl.int32).to(tl.float32)
        else:
            total = tl.dot(a_low, b_low, total, out_dtype=tl.int32)
            total = tl.dot(a_high, b_high, total, out_dtype=tl.int32)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    return total.to(tl.float32)


@triton.jit
def _int8_scaled_mm_kernel(
    q_ptr,
    weight_ptr,
    scale_ptr,
    weight_scale_ptr,
    bias_ptr,  # None: no bias
    y_ptr,
    M,
    N,
    K,
    stride_qm,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    FP32_ACCUMULATE: tl.constexpr,
):
    block_m, block_n = grouped_order(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the edge read the last row again, which costs no mask in the loop, and are not stored.
    row_m = tl.minimum(offs_m, M - 1)
    row_n = tl.minimum(offs_n, N - 1)
    y = int8_tile(
        q_ptr + row_m * stride_qm,
        weight_ptr + row_n * stride_wn,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        FP32_ACCUMULATE,
    )
    y = y * tl.load(scale_ptr + row_m)[:, None] * tl.load(weight_scale_ptr + row_n)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def launch_int8_scaled_mm(
    q: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulator: str,
    config: LaunchConfig,
) -> torch.Tensor:
    """Launch the GEMM.

    Args:
        q: [M, K] int8; rows contiguous, row stride free.
        weight: [N, K] int8; rows contiguous, row stride free.
        scale: [M] fp32, contiguous, of the rows of q.
        weight_scale: [N] fp32, contiguous, of the rows of weight.
        bias: [N], contiguous, or None.
        config: block_k is 128 with accumulator="fp32", which fixes how often it converts.

    Returns:
        [M, N] `out_dtype`, contiguous.
    """
    (M, K), N = q.shape, weight.shape[0]
    y = torch.empty((M, N), dtype=out_dtype, device=q.device)
    if y.numel() == 0:
        return y
    _int8_scaled_mm_kernel[(triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n),)](
        q,
        weight,
        scale,
        weight_scale,
        bias,
        y,
        M,
        N,
        K,
        q.stride(0),
        weight.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        EVEN_K=K % config.block_k == 0,
        FP32_ACCUMULATE=accumulator == "fp32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,  # scaling and bias round one after the other
    )
    return y
