"""DeepSeek's router after its logits: scores, groups, the best experts and their weights.

score = sigmoid(logits) (V3) or softmax(logits) (V2), fp32
biased = score + bias; it chooses, and only chooses
group score = the sum of a group's best two biased scores (V3), or its best (V2); the best `topk_group` groups stay
ids = the best `top_k` biased scores of those groups, descending; ties, also of groups, by the lowest index
weights = score[ids], divided by (their sum in slot order + 1e-20) if `renormalize`, times routed_scaling_factor
"""

import torch

from moe_int8.check import check_tensor
from moe_int8.custom_op import custom_op
from moe_int8.dispatch import use_triton

SCORINGS = ("sigmoid", "softmax")
GROUP_SCORES = ("top2_sum", "max")
LOWEST = torch.finfo(torch.float32).min  # finite: above the -inf of masked groups, where NaN scores must not fall


def grouped_topk_ref(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    scoring: str = "sigmoid",
    group_score: str = "top2_sum",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `grouped_topk` in plain torch."""
    scores = _softmax(logits) if scoring == "softmax" else (1 + torch.exp(-logits)).reciprocal()
    biased = scores if bias is None else scores + bias
    biased = torch.where(biased >= LOWEST, biased, LOWEST)  # NaN compares false
    if topk_group < n_group:
        groups = biased.unflatten(-1, (n_group, -1))  # [M, n_group, E / n_group]
        best = groups.topk(2 if group_score == "top2_sum" else 1, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _best(best, topk_group), True)
        biased = groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = _best(biased, top_k)
    weights = scores.gather(-1, ids)
    if renormalize:
        total = torch.zeros_like(weights[:, :1])
        for slot in weights.split(1, dim=-1):
            total = total + slot
        weights = weights / (total + 1e-20)
    return weights * routed_scaling_factor, ids.to(torch.int32)


def grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    scoring: str = "sigmoid",
    group_score: str = "top2_sum",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and their weights.

    The defaults with n_group=8, topk_group=4, top_k=8 and a bias are V3's `noaux_tc`; scoring="softmax" with
    group_score="max" is V2's `group_limited_greedy`, and with n_group=1 its `greedy`.

    Args:
        logits: [M, E] fp32, row stride free. A NaN chooses last, yet the ids of its row are distinct and in range.
        bias: [E] fp32 (`e_score_correction_bias`), or None.
        top_k: experts a token.
        n_group, topk_group: groups of E / n_group neighbouring experts, and how many of them a token may use.
        renormalize: divide the weights of a token by their sum (`norm_topk_prob`).
        routed_scaling_factor: applied to the weights, renormalised or not.
        scoring: "sigmoid" or "softmax".
        group_score: "top2_sum" or "max".

    Returns:
        topk_weights: [M, top_k] fp32.
        topk_ids: [M, top_k] int32, ordered by biased score, descending.

    Raises:
        ValueError: a tensor's dtype, shape or device is wrong, the sizes do not fit each other, or a name is unknown.
    """
    check_tensor("logits", logits, ("M", "E"), torch.float32)
    E = logits.shape[1]
    if bias is not None:
        check_tensor("bias", bias, (E,), torch.float32, device=logits.device)
    check_routing(E, top_k=top_k, n_group=n_group, topk_group=topk_group, scoring=scoring, group_score=group_score)
    return _grouped_topk(
        logits, bias, top_k, n_group, topk_group, renormalize, routed_scaling_factor, scoring, group_score
    )


def check_routing(E: int, *, top_k: int, n_group: int, topk_group: int, scoring: str, group_score: str) -> None:
    """Check a router's configuration for `E` experts; a model does so when it is built.

    Raises:
        ValueError: the sizes do not fit each other, or a name is unknown.
    """
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    if group_score not in GROUP_SCORES:
        raise ValueError(f"group_score must be one of {', '.join(GROUP_SCORES)}, got {group_score!r}")
    if n_group < 1 or E < 1 or E % n_group:
        raise ValueError(f"n_group must divide the number of experts, got n_group {n_group} and {E} experts")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group must be in 1..n_group, got topk_group {topk_group} and n_group {n_group}")
    if not 1 <= top_k <= topk_group * (E // n_group):
        raise ValueError(
            f"top_k must be in 1..{topk_group * (E // n_group)}, the experts of topk_group groups, "
            f"got top_k {top_k}, topk_group {topk_group}, n_group {n_group} and {E} experts"
        )
    if topk_group < n_group and group_score == "top2_sum" and E // n_group < 2:
        raise ValueError(
            f"group_score 'top2_sum' needs two experts a group or more, got n_group {n_group} and {E} experts"
        )


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Softmax whose sum is fp64, so that the order in which a device adds leaves no trace."""
    e = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    return e / e.sum(dim=-1, keepdim=True, dtype=torch.float64).float()


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of the best k, descending, ties by the lowest index, which torch.topk does not promise."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@custom_op("grouped_topk")
def _grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
    scoring: str,
    group_score: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if use_triton(logits):
        from moe_int8.kernels.grouped_topk import launch_grouped_topk

        with torch.cuda.device_of(logits):
            return launch_grouped_topk(
                logits,
                bias,
                top_k,
                n_group,
                topk_group,
                renormalize,
                routed_scaling_factor,
                softmax=scoring == "softmax",
                top2_sum=group_score == "top2_sum",
            )
    return grouped_topk_ref(
        logits,
        bias,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        scoring=scoring,
        group_score=group_score,
    )


@_grouped_topk.register_fake
def _(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
    scoring: str,
    group_score: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)
