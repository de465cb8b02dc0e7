"""Which tensors are quantised weights, and what names and config.json say of their format."""

import pytest

from moe_int8.models.deepseek.formats import named_format, projection_kind

PROJECTION = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    "name, kind",
    [
        ("model.layers.0.mlp.gate_proj.weight", "mlp.gate_proj"),
        ("model.layers.3.mlp.experts.17.gate_proj.weight", "experts.gate_proj"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared_experts.up_proj"),
        ("model.layers.61.self_attn.kv_b_proj.weight", "kv_b_proj"),
        ("model.layers.3.mlp.gate.weight", None),
        ("model.layers.3.mlp.gate.e_score_correction_bias", None),
        ("model.layers.3.self_attn.q_a_layernorm.weight", None),
        ("model.layers.3.mlp.gate_proj.weight_scale_inv", None),
        ("model.layers.61.eh_proj.weight", None),
        ("model.layers.61.shared_head.head.weight", None),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_c52_the_router_is_not_a_projection_and_gate_proj_is(name, kind):
    assert projection_kind(name) == kind


@pytest.mark.parametrize(
    "names, form",
    [([f"{PROJECTION}_scale_inv"], "fp8"), ([f"{PROJECTION}_scale"], "int8"), (["lm_head.weight"], "bf16")],
)
def test_names_tell_the_format_and_config_must_agree(names, form):
    names = [PROJECTION, *names]
    assert named_format(names, None) == named_format(names, form) == form
    for other in {"fp8", "int8"} - {form}:
        with pytest.raises(ValueError, match=f"says {other.upper()}, but the names of the tensors .* {form.upper()}"):
            named_format(names, other)
