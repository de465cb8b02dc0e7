import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_int8.models.deepseek.config import ConfigError, DeepseekConfig, RopeConfig
from moe_int8.models.deepseek.published import R1

OLD_YARN = R1["rope_scaling"]
V3 = R1 | {  # and what says nothing about the model's shape, as published
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "num_key_value_heads": 128,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
}
V31 = V3 | {"quantization_config": V3["quantization_config"] | {"scale_fmt": "ue8m0"}}
V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": OLD_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2_LITE = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
MOE = {  # small enough to count with
    **V3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
}


def read(config: dict, **changes) -> DeepseekConfig:
    return DeepseekConfig.from_dict(config | changes)


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def test_official_v3_values():
    config = read(V3)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (7168, 61, 129280)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_head_dim, config.latent_dim) == (1536, 512, 192, 576)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_group, config.topk_group) == (256, 8, 8, 4)
    assert (config.scoring_func, config.topk_method, config.norm_topk_prob) == ("sigmoid", "noaux_tc", True)
    assert config.routed_scaling_factor == 2.5
    assert config.num_nextn_predict_layers == 1
    assert config.rope == RopeConfig(10000.0, 40.0, 4096, 32.0, 1.0, 1.0, 1.0)


def test_v31_equals_v3():
    assert read(V31) == read(V3)


def test_old_and_new_spelling_of_rope_are_the_same():
    new_yarn = {**without(OLD_YARN, "type"), "rope_type": "yarn", "rope_theta": 10000.0}
    new = without(V3, "rope_scaling", "rope_theta") | {"rope_parameters": new_yarn}
    assert read(new) == read(V3)


def test_what_a_v3_config_may_leave_out():
    # transformers writes neither topk_method nor scoring_func for V3
    shorter = without(V3, "topk_method", "scoring_func", "norm_topk_prob", "moe_layer_freq", "auto_map")
    assert read(shorter) == read(V3)


def test_official_v2_values():
    config = read(V2)
    assert (config.topk_method, config.scoring_func, config.norm_topk_prob) == (
        "group_limited_greedy",
        "softmax",
        False,
    )
    assert (config.n_shared_experts, config.routed_scaling_factor) == (2, 16.0)
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)


def test_official_v2_lite_values():
    config = read(V2_LITE)
    assert config.q_lora_rank is None
    assert (config.topk_method, config.n_group, config.num_hidden_layers) == ("greedy", 1, 27)
    assert config.sharded_dimensions() == {
        "num_attention_heads": 16,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
    }


def test_c38_yarn_enters_the_softmax_scale_squared_and_through_mscale_all_dim():
    assert read(V3).softmax_scale == pytest.approx(0.135234, abs=5e-7)
    only_all_dim = read(V3, rope_scaling=OLD_YARN | {"mscale": 5.0})
    assert only_all_dim.softmax_scale == read(V3).softmax_scale
    assert read(V3, rope_scaling=OLD_YARN | {"mscale_all_dim": 0.0}).softmax_scale == pytest.approx(0.072169, abs=5e-7)
    assert read(V3, rope_scaling=None).softmax_scale == 192**-0.5


def test_c40_the_context_limit_is_not_multiplied_by_the_factor():
    assert read(V3).max_position_embeddings == 163_840


@pytest.mark.parametrize("dense, moe_layers", [(0, [0, 1, 2, 3]), (2, [2, 3]), (4, [])])
def test_c41_the_first_layers_are_dense(dense, moe_layers):
    config = read(V3, num_hidden_layers=4, first_k_dense_replace=dense)
    assert [layer for layer in range(4) if config.is_moe(layer)] == moe_layers


def test_c41_official_v3_has_three_dense_layers():
    assert [read(V3).is_moe(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]


def test_a_model_without_experts_is_dense_throughout():
    config = read(without(V3, "moe_intermediate_size", "num_experts_per_tok"), n_routed_experts=0)
    assert not any(config.is_moe(layer) for layer in range(61))


def test_c24_more_experts_a_token_than_its_groups_hold():
    with pytest.raises(ConfigError, match=r"top_k 4, topk_group 1, n_group 4 and 8 experts"):
        read(MOE, topk_group=1, num_experts_per_tok=4)
    assert read(MOE, topk_group=1, num_experts_per_tok=2).num_experts_per_tok == 2


def test_c24_experts_that_do_not_split_into_groups():
    with pytest.raises(ConfigError, match=r"n_group 4 and 10 experts"):
        read(MOE, n_routed_experts=10)


def test_c24_more_groups_kept_than_there_are():
    with pytest.raises(ConfigError, match=r"topk_group 5 and n_group 4"):
        read(MOE, topk_group=5)


def test_c24_groups_of_one_expert_have_no_best_two():
    with pytest.raises(ConfigError, match=r"n_group 8 and 8 experts"):
        read(MOE, n_group=8, topk_group=7)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ({"scoring_func": "softmax"}, "topk_method 'noaux_tc' with scoring_func 'softmax'"),
        ({"topk_method": "beam"}, "topk_method 'beam'"),
        ({"topk_method": ["noaux_tc"]}, r"topk_method \['noaux_tc'\]"),
        ({"scoring_func": {}}, r"scoring_func \{\}"),
        ({"topk_method": "greedy", "scoring_func": "softmax", "num_experts_per_tok": 9}, "top_k 9, .* 8 experts"),
        ({"hidden_size": 0}, "hidden_size .* got 0"),
        ({"hidden_size": 2**31}, "hidden_size .* got 2147483648"),
        ({"hidden_size": 7168.0}, "hidden_size .* got 7168.0"),
        ({"num_attention_heads": True}, "num_attention_heads .* got True"),
        ({"num_hidden_layers": "61"}, "num_hidden_layers .* got '61'"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"q_lora_rank": -1}, "q_lora_rank .* got -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps .* got 0"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor .* got nan"),
        ({"routed_scaling_factor": 10**400}, "routed_scaling_factor .* got 1000"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob .* got 'false'"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"rope_theta": 1}, "rope_theta .* got 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling.* got 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"rope_scaling": OLD_YARN | {"factor": -1}}, "factor .* got -1"),
        ({"rope_scaling": OLD_YARN | {"beta_fast": "32"}}, "beta_fast .* got '32'"),
        ({"rope_scaling": OLD_YARN | {"beta_slow": 5e-324}}, "beta_slow .* got 5e-324"),
        ({"rope_scaling": OLD_YARN | {"mscale": -0.1}}, "mscale must not be negative, got -0.1"),
        ({"rope_scaling": OLD_YARN | {"mscale_all_dim": -5}}, "mscale_all_dim must not be negative, got -5"),
        ({"hidden_size": "x" * 10_000}, r"hidden_size .* got 'x{20,40}\.\.\.x{20,40}'$"),
        ({"architectures": ["\x1b[2J\n"]}, r"architecture '\\x1b\[2J\\n'"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture 'LlamaForCausalLM'"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "V3.2, sparse attention"),
        ({"architectures": None}, "architecture None"),
    ],
)
def test_an_error_names_the_field_and_its_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(MOE, **changes)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 0, 1, 2**31])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(field=st.sampled_from(sorted(V3)), value=JSON)
def test_random_values_of_a_field_raise_nothing_but_config_error(field, value):
    try:
        config = read(V3, **{field: value})
    except ConfigError:
        return
    assert config.softmax_scale > 0


@settings(max_examples=200, deadline=None)
@given(field=st.sampled_from([*OLD_YARN, "rope_type", "rope_theta"]), value=JSON, new=st.booleans())
def test_random_values_of_a_rope_field_raise_nothing_but_config_error(field, value, new):
    try:
        config = read(V3, **{"rope_parameters" if new else "rope_scaling": OLD_YARN | {field: value}})
    except ConfigError:
        return
    assert math.isfinite(config.softmax_scale)


@settings(max_examples=100, deadline=None)
@given(content=st.dictionaries(st.sampled_from(sorted(V3)), JSON, max_size=3))
def test_a_config_of_random_fields_raises_nothing_but_config_error(content):
    with pytest.raises(ConfigError):
        read(content | {"vocab_size": None})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x00", '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_a_file_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config"):
        DeepseekConfig.from_folder(tmp_path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="config"):
        DeepseekConfig.from_folder(tmp_path)


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        DeepseekConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no config"):
        DeepseekConfig.from_folder(tmp_path)


def test_reads_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert DeepseekConfig.from_folder(tmp_path) == read(V3)
