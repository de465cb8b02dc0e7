"""The fused mixture of experts: quantize, gate and up, SwiGLU, quantize, down, weighted sum over a token's experts."""

from functools import partial
from typing import Any, NamedTuple

import torch

from moe_int8.activation import swiglu
from moe_int8.check import check_accumulator, check_tensor
from moe_int8.custom_op import custom_op
from moe_int8.dense import check_out_dtype, check_sum_fits, flat_scale, int8_matmul_cpu, int8_scaled_mm_ref
from moe_int8.dispatch import use_triton
from moe_int8.quantize import check_rows, quantize_per_token, quantize_per_token_ref

SCRATCH_BYTES = 512 * 2**20  # most scratch memory of a call: more tokens than it holds go through in several chunks
ID_DTYPES = (torch.int32, torch.int64)


def fused_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    accumulator: str = "int32",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run every token through its experts and sum their outputs.

    For each token m and slot k, with e = topk_ids[m, k] and all scalings in fp32, in this order:

        gate, up = (q[m] @ w13[e].T) * scale[m] * w13_scale[e]        (not rounded to x's dtype)
        h = (gate / (1 + exp(-gate))) * up                            (rounded once to x's dtype, then quantized)
        z[m, k] = (q_h @ w2[e].T) * scale_h * w2_scale[e] * topk_weights[m, k]      (rounded once to x's dtype)
        y[m] = (z[m, 0] + z[m, 1] + ...) * routed_scaling_factor      (summed in fp32 in slot order, one cast)

    Args:
        x: [..., H] bf16, fp16 or fp32; or int8 codes, whose scales are `x_scale`. Not written, unless it is `out`.
        w13: [E, 2I, H] int8, rows contiguous: gate rows, then up rows.
        w13_scale: [E, 2I, 1] or [E, 2I] fp32, one for each output channel.
        w2: [E, H, I] int8, rows contiguous.
        w2_scale: [E, H, 1] or [E, H] fp32, one for each output channel.
        topk_weights: [..., topk] fp32.
        topk_ids: [..., topk] int32 or int64. A slot whose id is negative, too large, or not local under `expert_map`
            contributes exactly 0.
        x_scale: [..., 1] or [...] fp32, with int8 x only; "x's dtype" above is then `out_dtype`.
        expert_map: [E_global] int32, the local expert of each global one, -1 for those of other ranks; None: topk_ids
            are local.
        accumulator: "int32": exact. "fp32": one exact int32 dot for each 128 of K, converted and added in order.
        out: [..., H], written and returned; may be x.
        out_dtype: None: out's dtype, else x's, else (int8 x) bf16.

    Returns:
        [..., H] `out_dtype`. With "int32" a token's result is bit-identical alone and in any batch.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    check_accumulator(accumulator)
    device = x.device
    if x_scale is None:
        check_rows("x", x, "H")
    else:
        check_tensor("x (with x_scale)", x, ["..."] * max(x.ndim - 1, 1) + ["H"], torch.int8)
        x_scale = flat_scale("x_scale", x_scale, x.shape[:-1], device)
    rows, H = x.shape[:-1], x.shape[-1]
    check_tensor("w13", w13, ("E", "2I", H), torch.int8, device=device)
    E, two_I = w13.shape[:2]
    check_sum_fits(H, accumulator)
    if two_I % 2:
        raise ValueError(f"w13 must hold as many gate as up rows, got {two_I} rows")
    check_tensor("w2", w2, (E, H, two_I // 2), torch.int8, device=device)
    check_tensor("topk_weights", topk_weights, (*rows, "topk"), torch.float32, device=device, contiguous_rows=False)
    check_tensor("topk_ids", topk_ids, topk_weights.shape, ID_DTYPES, device=device, contiguous_rows=False)
    if not topk_ids.shape[-1]:
        raise ValueError(f"topk_ids must name at least one expert for each token, got shape {list(topk_ids.shape)}")
    if expert_map is not None:
        check_tensor("expert_map", expert_map, ("E_global",), torch.int32, device=device)
        if not expert_map.numel():
            raise ValueError("expert_map must have an entry for each expert, got none")
    if out_dtype is None:
        out_dtype = out.dtype if out is not None else torch.bfloat16 if x_scale is not None else x.dtype
    check_out_dtype(out_dtype)

    arguments = (
        x.flatten(0, -2),
        x_scale,
        w13,
        flat_scale("w13_scale", w13_scale, (E, two_I), device).view(E, two_I),
        w2,
        flat_scale("w2_scale", w2_scale, (E, H), device).view(E, H),
        expert_map,
        topk_weights.flatten(0, -2).contiguous(),
        topk_ids.flatten(0, -2).contiguous(),
        routed_scaling_factor,
        accumulator,
    )
    if out is None:
        return _fused_moe(*arguments, out_dtype).view(x.shape)
    check_tensor("out", out, x.shape, out_dtype, device=device)
    if out.ndim > 2 and not out.is_contiguous():
        raise ValueError(f"out must be contiguous with {out.ndim} dimensions, got strides {out.stride()}")
    _fused_moe_out(*arguments, out.view(-1, H) if out.ndim != 2 else out)
    return out


def fused_moe_ref(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    accumulator: str = "int32",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The definition of `fused_moe` in plain torch, for x [M, H]."""
    if x_scale is None:
        dtype = x.dtype
        q, x_scale = quantize_per_token_ref(x)
    else:
        dtype = out_dtype or torch.bfloat16
        q, x_scale = x, x_scale.reshape(-1, 1)
    local = _local_ids(topk_ids, expert_map, w13.shape[0])
    z = torch.zeros((*topk_ids.shape, x.shape[1]), dtype=dtype, device=x.device)
    gemm = partial(int8_scaled_mm_ref, out_dtype=torch.float32, accumulator=accumulator)
    for e in range(w13.shape[0]):
        m, k = torch.where(local == e)
        gate, up = gemm(q[m], w13[e], x_scale[m], w13_scale[e]).chunk(2, dim=-1)
        q_h, scale_h = quantize_per_token_ref(swiglu(gate, up).to(dtype))
        expert_out = gemm(q_h, w2[e], scale_h, w2_scale[e])
        z[m, k] = (expert_out * topk_weights[m, k, None]).to(dtype)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot_out in z.unbind(dim=1):
        y += slot_out.float()
    return (y * routed_scaling_factor).to(out_dtype or dtype)


class _Experts(NamedTuple):
    """The experts of this rank, as `fused_moe` takes them; scales without a last dimension of one."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    expert_map: torch.Tensor | None


@custom_op("fused_moe")
def _fused_moe(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    routed_scaling_factor: float,
    accumulator: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    experts = _Experts(w13, w13_scale, w2, w2_scale, expert_map)
    _run_in_chunks(x, x_scale, experts, topk_weights, topk_ids, routed_scaling_factor, accumulator, out)
    return out


@_fused_moe.register_fake
def _(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, out_dtype = rest
    return torch.empty(x.shape, dtype=out_dtype, device=x.device)


@custom_op("fused_moe_out", mutates_args=("out",))
def _fused_moe_out(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    routed_scaling_factor: float,
    accumulator: str,
    out: torch.Tensor,
) -> None:
    experts = _Experts(w13, w13_scale, w2, w2_scale, expert_map)
    _run_in_chunks(x, x_scale, experts, topk_weights, topk_ids, routed_scaling_factor, accumulator, out)


@_fused_moe_out.register_fake
def _(*_: Any) -> None:
    return None


def _run_in_chunks(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    experts: _Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    routed_scaling_factor: float,
    accumulator: str,
    out: torch.Tensor,
) -> None:
    """Write the MoE of x into out, as many tokens at a time as the scratch memory holds; none sees the others."""
    run = _run_triton if use_triton(x) else _run_cpu
    dtype = x.dtype if x_scale is None else out.dtype
    chunk = max(SCRATCH_BYTES // _scratch_bytes_per_token(topk_ids.shape[1], experts.w2, dtype), 1)
    with torch.cuda.device_of(x):
        for start in range(0, x.shape[0], chunk):
            tokens = slice(start, start + chunk)
            scale = None if x_scale is None else x_scale[tokens]
            run(
                x[tokens],
                scale,
                experts,
                topk_weights[tokens],
                topk_ids[tokens],
                routed_scaling_factor,
                accumulator,
                dtype,
                out[tokens],
            )


def _scratch_bytes_per_token(topk: int, w2: torch.Tensor, dtype: torch.dtype) -> int:
    _, H, N = w2.shape
    slot = N * dtype.itemsize + N + 4 + H * dtype.itemsize  # h, its codes and scale, the expert's output
    return topk * slot + H + 4  # and the token's codes and scale


def _run_triton(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    experts: _Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    factor: float,
    accumulator: str,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    from moe_int8.kernels.fused_moe import launch_fused_moe

    w13, w13_scale, w2, w2_scale, expert_map = experts
    routing = (topk_weights, topk_ids, expert_map)
    launch_fused_moe(x, x_scale, w13, w13_scale, w2, w2_scale, *routing, factor, accumulator, dtype, out)


def _run_cpu(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    experts: _Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    factor: float,
    accumulator: str,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    q, scale = quantize_per_token(x) if x_scale is None else (x, x_scale)
    scale = scale.view(-1)
    w13, w13_scale, w2, w2_scale, expert_map = experts
    (M, topk), (E, H, _) = topk_ids.shape, w2.shape
    local = _local_ids(topk_ids, expert_map, E).flatten()
    by_expert = local.argsort(stable=True)
    ends = torch.bincount(local + 1, minlength=E + 1).cumsum(0).tolist()  # first the slots that are not local
    z = torch.zeros((M * topk, H), dtype=dtype)
    for e in range(E):
        slots = by_expert[ends[e] : ends[e + 1]]
        if not slots.numel():
            continue
        tokens = slots // topk
        gate_up = int8_matmul_cpu(q[tokens], w13[e], accumulator).mul_(scale[tokens, None]).mul_(w13_scale[e])
        q_h, scale_h = quantize_per_token(swiglu(*gate_up.chunk(2, dim=-1)).to(dtype))
        expert_out = int8_matmul_cpu(q_h, w2[e], accumulator).mul_(scale_h).mul_(w2_scale[e])
        z[slots] = expert_out.mul_(topk_weights.flatten()[slots, None]).to(dtype)
    total = torch.zeros(out.shape, dtype=torch.float32)
    for slot_out in z.view(M, topk, H).unbind(dim=1):
        total += slot_out
    out.copy_(total.mul_(factor))


def _local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """The local expert of each slot as int64, -1 for one that is not local."""
    ids = topk_ids.long()
    if expert_map is not None:
        valid = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(valid, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)
