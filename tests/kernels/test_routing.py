import pytest
import torch

from moe_int8.routing import check_routing, grouped_topk, grouped_topk_ref

V3 = {"top_k": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
V2 = {
    "top_k": 6,
    "n_group": 8,
    "topk_group": 3,
    "renormalize": False,
    "routed_scaling_factor": 16.0,
    "scoring": "softmax",
    "group_score": "max",
}
V2_LITE = {"top_k": 6, "renormalize": False, "scoring": "softmax", "group_score": "max"}


def logit(*scores):
    return torch.tensor([scores], dtype=torch.float64).logit().float()


def test_c15_bias_steers_selection_only(device):
    logits = torch.tensor([[0.0, 2.0, -2.0, -3.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 1.5, 0.0], device=device)
    weights, ids = grouped_topk(logits, bias, top_k=2, routed_scaling_factor=2.5)
    assert ids.tolist() == [[2, 1]]
    assert weights.tolist() == [pytest.approx([0.298007, 2.201993], abs=1e-6)]


def test_c16_group_score_is_the_sum_of_the_best_two(device):
    logits = logit(0.9, 0.1, 0.6, 0.6).to(device)
    groups = {"top_k": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
    weights, ids = grouped_topk(logits, torch.zeros(4, device=device), **groups)
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [pytest.approx([1.25, 1.25])]
    assert grouped_topk(logits, **groups, group_score="max")[1].tolist() == [[0, 1]]  # 0.9 is the best single score


def test_c17_masked_groups_lose_against_negative_scores(device):
    bias = torch.tensor([-0.6, -0.7, -1.0, -1.1], device=device)
    weights, ids = grouped_topk(
        torch.zeros(1, 4, device=device), bias, top_k=2, n_group=2, topk_group=1, routed_scaling_factor=2.5
    )
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [pytest.approx([1.25, 1.25])]


def test_c18_factor_is_applied_once(device):
    weights, _ = grouped_topk(torch.randn(3, 8, device=device), top_k=2, routed_scaling_factor=2.5)
    assert weights.sum(-1).tolist() == pytest.approx([2.5] * 3)
    logits = torch.zeros(1, 4, device=device)
    assert grouped_topk(logits, top_k=2, renormalize=False, routed_scaling_factor=2.5)[0].tolist() == [[1.25, 1.25]]


def test_c19_bias_stays_fp32(device):
    logits = torch.zeros(1, 4, device=device)
    bias = torch.tensor([7.00, 7.01, 7.02, 6.99], device=device)
    assert grouped_topk(logits, bias, top_k=2)[1].tolist() == [[2, 1]]
    with pytest.raises(ValueError, match=r"bias must be float32 \[4\].*got bfloat16 \[4\]"):
        grouped_topk(logits, bias.bfloat16(), top_k=2)


def test_c20_logits_stay_fp32(device):
    logits = torch.tensor([[2.000, 2.004]], device=device)
    assert grouped_topk(logits, top_k=1)[1].tolist() == [[1]]
    with pytest.raises(ValueError, match=r"logits must be float32 \[M, E\].*got bfloat16 \[1, 2\]"):
        grouped_topk(logits.bfloat16(), top_k=1)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (4, 2)])
def test_c21_nan_row_has_distinct_ids_in_range_and_touches_no_other(n_group, topk_group, scoring, device):
    routing = {"top_k": 3, "n_group": n_group, "topk_group": topk_group, "scoring": scoring}
    logits = torch.randn(4, 8, device=device)
    logits[0] = float("nan")
    logits[2, 1:] = float("nan")
    logits[3, 4] = float("inf")
    bias = torch.randn(8, device=device)
    weights, ids = grouped_topk(logits, bias, **routing)
    for row in ids.tolist():
        assert len(set(row)) == 3
        assert all(0 <= i < 8 for i in row)
    assert ids[0].tolist() == [0, 1, 2]  # every score ties: the lowest indices
    assert weights[0].isnan().all()
    assert torch.equal(ids, grouped_topk_ref(logits, bias, **routing)[1])
    alone = grouped_topk(logits[1:2], bias, **routing)
    assert torch.equal(weights[1:2], alone[0])
    assert torch.equal(ids[1:2], alone[1])


def test_c21_expert_with_nan_is_chosen_last(device):
    logits = torch.tensor([[float("nan"), -50.0, -60.0, float("nan")]], device=device)
    weights, ids = grouped_topk(logits, torch.full((4,), -9.0, device=device), top_k=2, renormalize=False)
    assert ids.tolist() == [[1, 2]]
    assert weights.isfinite().all()


@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (4, 2)])
def test_c22_ties_go_to_the_lowest_index(n_group, topk_group, device):
    routing = {"top_k": 2, "n_group": n_group, "topk_group": topk_group}
    logits, bias = torch.zeros(100, 8, device=device), torch.zeros(8, device=device)
    assert grouped_topk(logits, bias, **routing)[1].tolist() == [[0, 1]] * 100
    bias[5] = 1.0  # group 2 is best, groups 0, 1 and 3 tie, and so do the experts
    assert grouped_topk(logits[:1], bias, **routing)[1].tolist() == [[5, 0]]


@pytest.mark.parametrize(
    "E, changed, message",
    [
        (8, {"n_group": 4, "topk_group": 1, "top_k": 4}, r"top_k 4, topk_group 1, n_group 4 and 8 experts"),
        (10, {"n_group": 4}, r"n_group 4 and 10 experts"),
        (8, {"n_group": 0}, r"n_group 0 and 8 experts"),
        (8, {"n_group": 2, "topk_group": 3}, r"topk_group 3 and n_group 2"),
        (8, {"topk_group": 0}, r"topk_group 0 and n_group 1"),
        (8, {"top_k": 0}, r"top_k 0"),
        (8, {"top_k": 9}, r"top_k must be in 1\.\.8.*got top_k 9"),
        (8, {"n_group": 8, "topk_group": 4}, r"two experts a group or more, got n_group 8 and 8 experts"),
        (8, {"scoring": "tanh"}, r"scoring must be one of sigmoid, softmax, got 'tanh'"),
        (8, {"group_score": "mean"}, r"group_score must be one of top2_sum, max, got 'mean'"),
    ],
)
def test_c24_configuration_that_cannot_work_is_named(E, changed, message):
    routing = {"top_k": 2, "n_group": 1, "topk_group": 1, "scoring": "sigmoid", "group_score": "top2_sum"} | changed
    with pytest.raises(ValueError, match=message):
        grouped_topk(torch.zeros(1, E), **routing)
    with pytest.raises(ValueError, match=message):
        check_routing(E, **routing)


@pytest.mark.parametrize(
    "E, routing, with_bias",
    [
        pytest.param(256, V3, True, id="V3"),
        pytest.param(160, V2, False, id="V2"),  # groups of 20, no power of two
        pytest.param(64, V2_LITE, False, id="V2-Lite"),
        pytest.param(24, {"top_k": 5, "n_group": 3, "topk_group": 2}, True, id="three-groups"),
        pytest.param(6, {"top_k": 2, "n_group": 6, "topk_group": 3, "group_score": "max"}, True, id="groups-of-one"),
        pytest.param(8, {"top_k": 8, "n_group": 2, "topk_group": 2}, False, id="everything"),
    ],
)
def test_matches_reference(E, routing, with_bias, device):
    # Scores of a row are apart by more than an exp can differ: evenly spaced logits in a random order.
    logits = torch.stack([torch.linspace(-3, 3, E)[torch.randperm(E)] for _ in range(8)]).to(device)
    bias = (torch.randint(0, 8, (E,)) / 8 + torch.arange(E) * 1e-4).to(device) if with_bias else None
    weights, ids = grouped_topk(logits, bias, **routing)
    weights_ref, ids_ref = grouped_topk_ref(logits, bias, **routing)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids, ids_ref)
    torch.testing.assert_close(weights, weights_ref, rtol=2e-6, atol=0)  # exp: a few fp32 ulp


def test_v2_weights_are_the_softmax_over_all_experts(device):
    logits = torch.randn(4, 160, device=device)
    weights, ids = grouped_topk(logits, **V2)
    exact = torch.softmax(logits.double(), dim=-1).gather(-1, ids.long()) * 16
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=0)


def test_slots_are_ordered_by_biased_score(device):
    logits, bias = torch.randn(16, 256, device=device), torch.randn(256, device=device)
    ids = grouped_topk(logits, bias, **V3)[1].long()
    biased = (logits.double().sigmoid() + bias).gather(-1, ids)
    assert (biased.diff(dim=-1) <= 1e-6).all()
    assert all(len(set(row)) <= 4 for row in (ids // 32).tolist())  # no more groups than topk_group


def test_row_alone_and_in_any_batch_has_the_same_bits(device):
    logits, bias = torch.randn(6, 256, device=device), torch.randn(256, device=device)
    for routing in (V3, V3 | {"scoring": "softmax"}):
        weights, ids = grouped_topk(logits, bias, **routing)
        for m in range(6):
            alone = grouped_topk(logits[m : m + 1], bias, **routing)
            assert torch.equal(alone[0], weights[m : m + 1])
            assert torch.equal(alone[1], ids[m : m + 1])


def test_any_row_stride(device):
    logits = torch.randn(5, 40, device=device)[:, 4:36]
    for strided, dense in zip(grouped_topk(logits, top_k=4), grouped_topk(logits.contiguous(), top_k=4), strict=True):
        assert torch.equal(strided, dense)


def test_no_tokens(device):
    weights, ids = grouped_topk(torch.empty(0, 256, device=device), torch.zeros(256, device=device), **V3)
    assert (weights.shape, weights.dtype) == ((0, 8), torch.float32)
    assert (ids.shape, ids.dtype) == ((0, 8), torch.int32)


def test_wrong_bias_is_named():
    with pytest.raises(ValueError, match=r"bias must be float32 \[4\].*got float32 \[3\]"):
        grouped_topk(torch.zeros(1, 4), torch.zeros(3), top_k=1)


@pytest.mark.parametrize("with_bias", [False, True])
def test_operator_is_registered_right(with_bias, device):
    logits = torch.randn(3, 20, device=device)[:, :16]
    bias = torch.randn(16, device=device) if with_bias else None
    torch.library.opcheck(
        torch.ops.moe_int8.grouped_topk.default, (logits, bias, 2, 4, 2, True, 2.5, "sigmoid", "top2_sum")
    )
