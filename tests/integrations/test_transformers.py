"""`quantize_` on a model of transformers, against our own model with the same INT8 weights."""

import weakref

import pytest
import torch
from tiny import (
    PLAIN_ROPE,
    V2,
    V3,
    load_reference,
    make_reference,
    quantized_copy,
    random_tokens,
    reference_logits,
    save,
    whole_logits,
)
from torch import nn

from moe_int8.integrations.transformers import Int8Experts, Int8Linear, quantize_
from moe_int8.models.deepseek.weights import load_model

# Every expert is chosen: a rounding step cannot flip a choice, and what is left is smooth.
EVERY_EXPERT = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "rope_parameters": PLAIN_ROPE}
CONFIGS = {"v3": V3 | EVERY_EXPERT, "v2": V2 | EVERY_EXPERT}


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def folders(request, tmp_path_factory):
    """(folder of an INT8 checkpoint, folder with the fp32 weights that its codes stand for)."""
    base = tmp_path_factory.mktemp("model")
    save(make_reference(request.param), base / "fp32")
    quantized_copy(base / "fp32", base / "int8", base / "dequantized")
    return base / "int8", base / "dequantized"


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()


@pytest.mark.parametrize("accumulator", ["int32", "fp32"])
def test_logits_equal_our_own_model_on_the_same_int8_weights(folders, accumulator):
    """Both quantize the same values but for fp32's rounding before the quantizer, 1e-7. Where that decides a code, the
    code is off by one, 0.9 % of its row's mean size (derived in test_model.py), and such codes are one in thousands:
    a hundredth of the 6 % that all roundings together may make.
    """
    int8, dequantized = folders
    tokens = random_tokens(60)
    ours = whole_logits(load_model(int8, activation_dtype=torch.float32, accumulator=accumulator), tokens)
    plain = load_reference(dequantized)
    before = reference_logits(plain, tokens)
    after = reference_logits(quantize_(plain, accumulator), tokens)
    assert relative_error(after, ours) < 0.06 / 10
    assert 0.002 < relative_error(after, before) < 0.06  # it is w8a8, not w8; the bound is derived in test_model.py


def test_dequantized_again_it_equals_our_own_model_in_fp32(folders):
    """Whatever is not quantized computes as before, and the codes stand for the same weights."""
    int8, dequantized = folders
    model = quantize_(load_reference(dequantized))
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if isinstance(module, Int8Linear):
            linear = nn.Linear(module.weight.shape[1], module.weight.shape[0], bias=False)
            linear.weight.data = module.weight * module.weight_scale
            setattr(model.get_submodule(parent), child, linear)
        elif isinstance(module, Int8Experts):
            fresh = load_reference(dequantized).get_submodule(name)
            fresh.gate_up_proj.data = module.w13 * module.w13_scale
            fresh.down_proj.data = module.w2 * module.w2_scale
            setattr(model.get_submodule(parent), child, fresh)
    tokens = random_tokens(30)
    expected = whole_logits(load_model(int8, dtype="fp32"), tokens)
    # 1e-5 of logits of order one; transformers and our model differ in nothing but the order of fp32 sums
    torch.testing.assert_close(reference_logits(model, tokens), expected, rtol=1e-5, atol=3e-5)


def test_what_is_replaced_and_what_is_kept():
    model = make_reference(V3)
    kept = {n: p for n, p in model.named_parameters() if "kv_b_proj" in n or "norm" in n or "gate.weight" in n}
    kept |= {"lm_head.weight": model.lm_head.weight, "model.embed_tokens.weight": model.model.embed_tokens.weight}
    values = {name: parameter.clone() for name, parameter in kept.items()}
    assert quantize_(model) is model
    left = dict(model.named_parameters())
    assert set(left) == set(kept)
    for name, parameter in left.items():
        assert parameter is kept[name]
        assert torch.equal(parameter, values[name])
        assert not parameter.requires_grad
    attention = model.model.layers[0].self_attn
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
        assert isinstance(getattr(attention, name), Int8Linear)
    assert isinstance(model.model.layers[1].mlp.experts, Int8Experts)
    assert model.model.layers[1].mlp.experts.w13.dtype == torch.int8


def test_each_weight_is_freed_before_the_next_is_taken(monkeypatch):
    model = make_reference(V3)
    weights = [weakref.ref(m.weight) for m in model.modules() if isinstance(m, nn.Linear)]
    alive = []

    def counting(linear: nn.Linear, accumulator: str) -> Int8Linear:
        alive.append(sum(ref() is not None for ref in weights))
        return Int8Linear(linear, accumulator)

    monkeypatch.setattr("moe_int8.integrations.transformers.Int8Linear", counting)
    quantize_(model)
    assert alive == sorted(alive, reverse=True)
    assert alive[0] - alive[-1] == len(alive) - 1


def test_bf16_generates():
    model = quantize_(make_reference(V3).bfloat16())
    prompt = torch.tensor([random_tokens(5)])
    ids = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert ids.shape == (1, 9)
    assert model(prompt).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("change, message", [
    (lambda m: m.half(), "float16: load the model with dtype=torch.bfloat16"),
    (lambda m: m.to("meta"), "is on meta: load the model without offloading"),
    (quantize_, "quantized already"),
    (lambda m: setattr(m.config, "hidden_act", "gelu"), "must be silu, got gelu"),
    (lambda m: setattr(m.config, "model_type", "llama"), "deepseek_v2 and deepseek_v3, got llama"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_changed(change, message):
    model = make_reference(V3)
    change(model)
    modules = list(model.modules())
    with pytest.raises(ValueError, match=message):
        quantize_(model)
    assert list(model.modules()) == modules


def test_another_module_and_another_accumulator_are_refused():
    with pytest.raises(ValueError, match="got Linear"):
        quantize_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="accumulator"):
        quantize_(make_reference(V3), "int64")
