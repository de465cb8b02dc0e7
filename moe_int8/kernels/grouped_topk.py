"""The kernel of moe_int8.routing: one program routes one token, its scores laid out as [group, member]."""

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: above the -inf of masked groups, where NaN scores must not fall
NUM_WARPS = 1  # DeepSeek-V3's 256 scores are 8 a lane; more warps would only wait for each other


@triton.jit
def _scores(logits, SOFTMAX: tl.constexpr):
    """Sigmoid or softmax over everything, fp32; the softmax's sum is fp64, so that its order leaves no trace."""
    if SOFTMAX:
        e = tl.exp(logits - tl.max(logits))
        return tl.div_rn(e, tl.sum(e.to(tl.float64)).to(tl.float32))
    return tl.div_rn(1.0, 1.0 + tl.exp(-logits))


@triton.jit
def _group_scores(biased, GROUP: tl.constexpr, TOP2_SUM: tl.constexpr):
    """[G, S] -> [G]: the sum of each group's best two, or its best."""
    best, at = tl.max(biased, axis=1, return_indices=True)
    if TOP2_SUM:
        rest = tl.where(tl.arange(0, GROUP)[None, :] == at[:, None], float("-inf"), biased)
        best += tl.max(rest, axis=1)
    return best


@triton.jit
def _grouped_topk_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    stride_logits_m,
    routed_scaling_factor,
    E: tl.constexpr,
    N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    GROUPS: tl.constexpr,  # powers of two that hold the groups, the experts of one, and the slots
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    group_size: tl.constexpr = E // N_GROUP
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, GROUP)
    expert = group[:, None] * group_size + member[None, :]  # [GROUPS, GROUP]
    exists = (group[:, None] < N_GROUP) & (member[None, :] < group_size)
    logits = tl.load(logits_ptr + m * stride_logits_m + expert, mask=exists, other=float("-inf"))
    scores = _scores(logits, SOFTMAX)
    biased = scores
    if bias_ptr is not None:
        biased += tl.load(bias_ptr + expert, mask=exists, other=0.0)
    biased = tl.where(biased >= LOWEST, biased, LOWEST)  # NaN compares false
    biased = tl.where(exists, biased, float("-inf"))

    if TOPK_GROUP < N_GROUP:
        # A group's rank counts the groups before it: higher ones, and equal ones of a lower index.
        mine = _group_scores(biased, GROUP, TOP2_SUM)
        before = (mine[None, :] > mine[:, None]) | (
            (mine[None, :] == mine[:, None]) & (group[None, :] < group[:, None])
        )
        rank = tl.sum(before.to(tl.int32), axis=1)
        biased = tl.where((rank < TOPK_GROUP)[:, None], biased, float("-inf"))

    flat_biased = tl.reshape(biased, [GROUPS * GROUP])
    flat_scores = tl.reshape(scores, [GROUPS * GROUP])
    position = tl.arange(0, GROUPS * GROUP)
    slot = tl.arange(0, SLOTS)
    weights = tl.zeros([SLOTS], tl.float32)
    ids = tl.zeros([SLOTS], tl.int32)
    total = tl.zeros((), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(flat_biased, axis=0)  # ties: the lowest position, so the lowest expert
        score = tl.sum(tl.where(position == best, flat_scores, 0.0))
        total += score
        weights = tl.where(slot == k, score, weights)
        ids = tl.where(slot == k, best // GROUP * group_size + best % GROUP, ids)
        flat_biased = tl.where(position == best, float("-inf"), flat_biased)
    if RENORMALIZE:
        weights = tl.div_rn(weights, total + 1e-20)
    tl.store(weights_ptr + m * TOP_K + slot, weights * routed_scaling_factor, mask=slot < TOP_K)
    tl.store(ids_ptr + m * TOP_K + slot, ids, mask=slot < TOP_K)


def launch_grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
    softmax: bool,
    top2_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, E] -> weights fp32 [M, top_k], ids int32 [M, top_k]."""
    M, E = logits.shape
    weights = torch.empty((M, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((M, top_k), dtype=torch.int32, device=logits.device)
    if M:
        _grouped_topk_kernel[(M,)](
            logits,
            bias,
            weights,
            ids,
            logits.stride(0),
            routed_scaling_factor,
            E,
            n_group,
            topk_group,
            top_k,
            renormalize,
            softmax,
            top2_sum,
            **routing_blocks(E, n_group, top_k),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return weights, ids


def routing_blocks(E: int, n_group: int, top_k: int) -> dict[str, int]:
    """The powers of two that hold the groups, the experts of a group and the slots of a token."""
    return {
        "GROUPS": triton.next_power_of_2(n_group),
        "GROUP": triton.next_power_of_2(E // n_group),
        "SLOTS": triton.next_power_of_2(top_k),
    }
