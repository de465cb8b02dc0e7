import dataclasses

import pytest
import torch
from tiny import V2, V3
from torch import nn

from moe_int8.activation import silu_and_mul
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.moe import MLP, Experts, Gate, MoE, experts_float
from moe_int8.models.deepseek.precision import Precision
from moe_int8.parallel import Group, Groups, WeightFormat
from moe_int8.quantize import quantize_per_channel

CONFIG = DeepseekConfig.from_dict(V3)
ONE = Group()


def precision(dtype: torch.dtype = torch.float32, int8: bool = False) -> Precision:
    return Precision(dtype, lambda name: int8)


def make_moe(config: DeepseekConfig, dtype: torch.dtype = torch.float32, int8: bool = False) -> MoE:
    """A layer with random weights."""
    moe = MoE(config, "model.layers.1.mlp", precision(dtype, int8), ONE)
    for name, parameter in moe.named_parameters():
        if parameter.dtype == torch.int8:
            scale = getattr(moe.get_submodule(name.rpartition(".")[0]), f"{name.rpartition('.')[2]}_scale")
            codes, scales = quantize_per_channel(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
            parameter.data.copy_(codes)
            scale.data.copy_(scales.squeeze(-1))
        elif not name.endswith("_scale"):
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    return moe


def small_gate(logits_weight: list[list[float]], bias: list[float], **changes) -> Gate:
    E = len(bias)
    config = dataclasses.replace(
        CONFIG, hidden_size=len(logits_weight[0]), n_routed_experts=E, n_group=1, topk_group=1, **changes
    )
    gate = Gate(config)
    gate.weight.data = torch.tensor(logits_weight)
    gate.e_score_correction_bias.data = torch.tensor(bias)
    return gate


class Returns(nn.Module):
    """Stands in for experts: every expert gives `value`, times its routing weight, or scales x."""

    def __init__(self, value: float = 0.0, factor: float = 0.0) -> None:
        super().__init__()
        self.value, self.factor = value, factor

    def forward(self, x: torch.Tensor, topk_weights: torch.Tensor | None = None, *_: torch.Tensor) -> torch.Tensor:
        weight = 1.0 if topk_weights is None or self.factor else topk_weights.sum(dim=-1, keepdim=True)
        return x * self.factor + self.value * weight


def layer_of(routed: nn.Module, shared: nn.Module, factor: float = 2.5) -> MoE:
    moe = make_moe(dataclasses.replace(CONFIG, routed_scaling_factor=factor))
    moe.experts, moe.shared_experts = routed, shared
    return moe


@pytest.mark.parametrize("int8", [False, True])
def test_c08_the_input_is_not_overwritten(int8):
    moe = make_moe(CONFIG, int8=int8)
    x = torch.randn(5, CONFIG.hidden_size)
    copy = x.clone()
    out = moe(x)
    assert torch.equal(x, copy)
    assert out.data_ptr() != x.data_ptr()
    topk_weights, topk_ids = moe.gate(copy)
    expected = moe.experts(copy, topk_weights, topk_ids) + moe.shared_experts(copy)
    assert torch.equal(out, expected)


def test_c08_the_shared_expert_sees_the_input():
    moe = layer_of(Returns(factor=2.0), nn.Identity())
    moe.shared_experts.forward = lambda x: x + 1
    assert (moe(torch.full((1, CONFIG.hidden_size), 3.0)) == 10.0).all()  # 2 * 3 + (3 + 1); not 13


def test_c18_the_scaling_factor_is_applied_once():
    moe = layer_of(Returns(value=1.0), Returns())
    out = moe(torch.randn(4, CONFIG.hidden_size))
    torch.testing.assert_close(out, torch.full_like(out, 2.5))  # not 6.25, not 1


def test_c18_the_scaling_factor_is_applied_once_with_real_experts():
    plain = make_moe(dataclasses.replace(CONFIG, routed_scaling_factor=1.0), int8=True)
    scaled = MoE(CONFIG, "model.layers.1.mlp", precision(int8=True), ONE)
    scaled.load_state_dict(plain.state_dict())
    assert scaled.gate.config.routed_scaling_factor == 2.5
    plain.shared_experts = scaled.shared_experts = None
    x = torch.randn(4, CONFIG.hidden_size)
    torch.testing.assert_close(scaled(x), 2.5 * plain(x), rtol=1e-5, atol=1e-5)


def test_c23_the_shared_expert_is_not_scaled():
    x = torch.randn(4, CONFIG.hidden_size)
    only_shared = layer_of(Returns(), Returns(value=1.0))(x)
    assert (only_shared == 1.0).all()
    both = layer_of(Returns(value=1.0), Returns(value=1.0))(x)
    torch.testing.assert_close(both, torch.full_like(both, 3.5))


BIAS = [7.00, 7.01, 7.02, 6.99]  # as bfloat16: 7, 7, 7.03125, 7


def test_c19_the_bias_stays_fp32_when_the_layer_is_cast():
    gate = small_gate([[0.0, 0.0]] * 4, BIAS, num_experts_per_tok=2).to(torch.bfloat16)
    assert gate.weight.dtype == torch.float32
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(gate.e_score_correction_bias, torch.tensor(BIAS))  # and was not rounded on the way
    assert gate(torch.ones(1, 2, dtype=torch.bfloat16))[1].tolist() == [[2, 1]]


def test_c19_a_cast_of_the_whole_model_leaves_what_is_exact():
    config = dataclasses.replace(CONFIG, num_hidden_layers=2)
    model = DeepseekModel(config, precision(int8=True), Groups(), "cpu")
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data.normal_()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.to(torch.bfloat16)
    exact = ("gate.weight", "gate.e_score_correction_bias", "_scale")
    kept = [name for name in before if name.endswith(exact)]
    assert len(kept) == 2 + 2 * 4 + 2 + 2 + 2  # gate, 4 projections in each of 2 layers, dense, routed, shared
    for name, parameter in model.named_parameters():
        if name in kept:
            assert torch.equal(parameter, before[name])
        elif before[name].dtype == torch.int8:
            assert parameter.dtype == torch.int8
        else:
            assert parameter.dtype == torch.bfloat16


def test_c20_router_logits_are_not_rounded_to_bf16():
    # 2.004 = 1.0 + 1.004 as a sum of bf16 products: exact in fp32, 2.0 in bf16
    weight = [[1.0, 1.0], [1.0, 1.00390625]]
    gate = small_gate(weight, [0.0, 0.0], num_experts_per_tok=1)
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    assert (x.float() @ gate.weight.T).tolist() == [[2.0, 2.00390625]]
    assert (x @ gate.weight.T.bfloat16()).tolist() == [[2.0, 2.0]]
    topk_weights, topk_ids = gate(x)
    assert topk_ids.tolist() == [[1]]
    assert topk_weights.dtype == torch.float32


def test_c20_the_gate_weight_keeps_more_than_bf16():
    gate = small_gate([[2.0], [2.004]], [0.0, 0.0], num_experts_per_tok=1)
    assert gate.to(torch.bfloat16)(torch.ones(1, 1, dtype=torch.bfloat16))[1].tolist() == [[1]]


def test_c15_the_bias_chooses_and_does_not_weigh():
    gate = small_gate([[0.0], [2.0], [-2.0], [-3.0]], [0.0, 0.0, 1.5, 0.0], num_experts_per_tok=2)
    topk_weights, topk_ids = gate(torch.ones(1, 1))
    assert topk_ids.tolist() == [[2, 1]]
    torch.testing.assert_close(topk_weights, torch.tensor([[0.298007, 2.201993]]))


def test_v2_gates_use_softmax_and_the_best_of_a_group():
    sizes = {"n_group": 2, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "hidden_size": 4}
    group_limited, greedy = (
        DeepseekConfig.from_dict(V2 | sizes | {"topk_method": method}) for method in ("group_limited_greedy", "greedy")
    )
    logits = torch.tensor([[3.0, 0.0, 2.5, 2.5]])
    scores = logits.softmax(dim=-1)[0]
    for config, ids in (
        (group_limited, [0, 1]),  # group 0 holds the best expert; the sum of two would choose group 1
        (greedy, [0, 2]),
    ):
        gate = Gate(config)
        gate.weight.data = torch.eye(4)
        topk_weights, topk_ids = gate(logits)
        assert gate.e_score_correction_bias is None
        assert topk_ids.tolist() == [ids]
        torch.testing.assert_close(topk_weights[0], scores[ids] * 1.5)


@pytest.mark.parametrize("M", [0, 1, 7])
def test_experts_float_equals_a_plain_loop(M):
    E, inter, hidden, topk = 6, 4, 8, 3
    x, w13, w2 = torch.randn(M, hidden), torch.randn(E, 2 * inter, hidden), torch.randn(E, hidden, inter)
    topk_weights = torch.rand(M, topk)
    topk_ids = torch.rand(M, E - 1).argsort(dim=-1)[:, :topk].int()  # nobody chooses the last expert
    expected = torch.zeros(M, hidden)
    for m in range(M):
        for k in range(topk):
            e = topk_ids[m, k]
            gate, up = (w13[e] @ x[m]).chunk(2)
            expected[m] += topk_weights[m, k] * (w2[e] @ (gate * torch.sigmoid(gate) * up))
    out = experts_float(x, w13, w2, topk_weights, topk_ids)
    assert out.shape == (M, hidden)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


def test_experts_float_keeps_the_dtype_of_x():
    moe = make_moe(CONFIG, torch.bfloat16)
    x = torch.randn(3, CONFIG.hidden_size, dtype=torch.bfloat16)
    assert moe(x).dtype == torch.bfloat16


def test_float_and_int8_experts_agree_within_the_rounding_of_activations():
    """Two rounded inputs, x and h: 4 / 440 each (see test_model.py), in quadrature 1.3 %; margin 2."""
    int8 = make_moe(CONFIG, int8=True)
    same = MoE(CONFIG, "model.layers.1.mlp", precision(), ONE)
    for name, parameter in same.named_parameters():
        stored = int8.get_parameter(name)
        if stored.dtype == torch.int8:
            scale = int8.get_parameter(f"{name}_scale")
            parameter.data = stored.float() * scale[..., None]
        else:
            parameter.data = stored.data
    x = torch.randn(20, CONFIG.hidden_size)
    out, expected = int8(x), same(x)
    assert 1e-3 < (out - expected).norm() / expected.norm() < 0.026


def test_two_shared_experts_are_one_of_twice_the_size():
    config = DeepseekConfig.from_dict(V2)
    moe = make_moe(config)
    assert moe.shared_experts.gate_up_proj.weight.shape == (2 * 2 * 32, 64)
    x = torch.randn(3, 64)
    gate, up = moe.shared_experts.gate_up_proj.weight.chunk(2)
    down = moe.shared_experts.down_proj.weight
    expected = sum(
        silu_and_mul(torch.cat((x @ gate[part].T, x @ up[part].T), dim=-1)) @ down[:, part].T
        for part in (slice(0, 32), slice(32, 64))
    )
    torch.testing.assert_close(moe.shared_experts(x), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_without_shared_experts():
    moe = make_moe(dataclasses.replace(CONFIG, n_shared_experts=0))
    assert moe.shared_experts is None
    x = torch.randn(2, CONFIG.hidden_size)
    assert torch.equal(moe(x), moe.experts(x, *moe.gate(x)))


def test_mlp_is_down_of_silu_gate_times_up():
    mlp = MLP(1, 1, "mlp", precision(), ONE)
    mlp.gate_up_proj.weight.data = torch.tensor([[1.0], [100.0]])  # gate, then up
    mlp.down_proj.weight.data = torch.tensor([[2.0]])
    assert mlp(torch.ones(1, 1)).item() == pytest.approx(2 * 73.1059, rel=1e-5)


def test_the_accumulator_reaches_the_experts(monkeypatch):
    asked = []
    monkeypatch.setattr("moe_int8.models.deepseek.moe.fused_moe", lambda *_, accumulator: asked.append(accumulator))
    for accumulator in ("int32", "fp32"):
        experts = Experts(DeepseekConfig.from_dict(V3), WeightFormat(torch.float32, True, accumulator), Group())
        experts(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 1))
    assert asked == ["int32", "fp32"]


def test_float_experts_whose_rows_torch_cannot_multiply_are_refused():
    config = DeepseekConfig.from_dict(V3 | {"moe_intermediate_size": 24})
    bf16 = WeightFormat(torch.bfloat16)
    Experts(config, bf16, Group())  # 48 bytes
    with pytest.raises(ValueError, match="moe_intermediate_size a rank 12; use int8, or fewer ranks"):
        Experts(config, bf16, Group(0, 2))


def test_a_correction_bias_of_another_shape_is_refused():
    class One:
        shape = (1,)

        def read_float(self, *_: object) -> torch.Tensor:
            return torch.zeros(1)

    gate = small_gate([[0.0], [1.0], [2.0], [3.0]], [0.0] * 4)
    with pytest.raises(ValueError, match=r"shape \[1\], the model needs \[4\]"):
        gate.load_bias(One())
