"""The launches of the fused MoE, one after the other: which kernels run depends on the number of tokens alone."""

import torch

from moe_int8.kernels.moe_align import launch_moe_align
from moe_int8.kernels.moe_combine import launch_moe_combine
from moe_int8.kernels.moe_few_tokens import launch_moe_few_tokens
from moe_int8.kernels.moe_gemm import launch_moe_down, launch_moe_gate_up
from moe_int8.tuning import FewTokensConfig, moe_plan


def launch_fused_moe(
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
    accumulator: str,
    dtype: torch.dtype,
    y: torch.Tensor,
) -> None:
    """Write the MoE of x [M, H] into y [M, H]; arguments as in `moe_int8.moe.fused_moe`, with flat scales.

    Args:
        dtype: to which h and the experts' outputs are rounded.
    """
    (M, topk), (E, _, inter) = topk_ids.shape, w2.shape
    spread = E if expert_map is None else expert_map.numel()
    plan = moe_plan(M, topk, spread, inter, x.device, accumulator)
    if isinstance(plan, FewTokensConfig):
        launch_moe_few_tokens(
            x,
            x_scale,
            w13,
            w13_scale,
            w2,
            w2_scale,
            topk_weights,
            topk_ids,
            expert_map,
            factor,
            dtype,
            plan,
            y,
        )
        return
    q, scale, alignment = launch_moe_align(x, x_scale, topk_ids, expert_map, E, plan.gate_up.block_m)
    q_h, scale_h = launch_moe_gate_up(q, scale, w13, w13_scale, alignment, topk, dtype, accumulator, plan.gate_up)
    z = launch_moe_down(q_h, scale_h, w2, w2_scale, topk_weights, alignment, dtype, accumulator, plan.down)
    launch_moe_combine(z, topk_ids, expert_map, E, factor, y)
