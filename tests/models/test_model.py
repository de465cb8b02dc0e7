"""The whole model: against transformers in fp32, its own forms against each other, and int8 within a derived bound."""

import pytest
import torch
from tiny import (
    PLAIN_ROPE,
    V2,
    V3,
    YARN,
    Driver,
    load_reference,
    make_reference,
    quantized_copy,
    random_tokens,
    reference_logits,
    save,
    whole_logits,
)

from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.weights import load_model

CONFIGS = {
    "v3": V3,
    "v3-only-moe-c41": V3 | {"first_k_dense_replace": 0},
    "v3-4-layers-2-dense-c41": V3 | {"num_hidden_layers": 4, "first_k_dense_replace": 2},
    "v3-only-dense-c41": V3 | {"first_k_dense_replace": 3},
    "v3-one-group": V3 | {"n_group": 1, "topk_group": 1},
    "v3-no-yarn": V3 | {"rope_parameters": PLAIN_ROPE},
    "v3-mscales-differ": V3 | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "v3-no-q-lora": V3 | {"q_lora_rank": None},
    "v3-not-normalized": V3 | {"norm_topk_prob": False},
    "v2-greedy": V2,
    "v2-lite-greedy-no-q-lora": V2 | {"q_lora_rank": None},
    "v2-group-limited": V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_transformers_in_fp32(config, tmp_path):
    reference = make_reference(config)
    folder = save(reference, tmp_path)
    tokens = random_tokens(150)  # three blocks, and past the original context of 64
    logits = whole_logits(load_model(folder), tokens)
    expected = reference_logits(reference, tokens)
    assert expected.std() > 0.5  # the comparison is not one of near-zeros
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    """An fp32 model."""
    return load_model(save(make_reference(V3), tmp_path_factory.mktemp("v3")))


def test_cached_absorbed_decode_equals_naive_recompute_of_everything(v3):
    tokens = random_tokens(75)
    driver = Driver(v3)
    driver.logits([tokens], [range(60)])
    for position in range(60, 75):  # over a block's end
        decoded = driver.logits([tokens], [range(position, position + 1)], decode=True)
        recomputed = whole_logits(v3, tokens[: position + 1])[-1:]
        torch.testing.assert_close(decoded, recomputed, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_whole(v3, chunk):
    tokens = random_tokens(80)
    driver = Driver(v3)
    spans = [range(start, min(start + chunk, 80)) for start in range(0, 80, chunk)]
    chunked = torch.cat([driver.logits([tokens], [span]) for span in spans])
    torch.testing.assert_close(chunked, whole_logits(v3, tokens), rtol=0, atol=1e-5)


def test_c43_unequal_prompts_in_one_batch_equal_single_runs(v3):
    prompts = [random_tokens(3, seed=1), random_tokens(7, seed=2), random_tokens(70, seed=3)]
    driver = Driver(v3, blocks=[[2], [0], [3, 1]])
    batched = driver.logits(prompts, [range(len(prompt)) for prompt in prompts])
    alone = [whole_logits(v3, prompt) for prompt in prompts]
    torch.testing.assert_close(batched, torch.cat(alone), rtol=0, atol=1e-5)

    params = SamplingParams(max_new_tokens=5)
    together = Generator(v3, max_batch=3, max_model_len=128).generate(prompts, params)
    for prompt, completion in zip(prompts, together):
        assert [completion] == Generator(v3, max_batch=1, max_model_len=128).generate([prompt], params)
        assert len(completion.tokens) == 5


def test_decode_of_unequal_lengths_equals_single_runs(v3):
    texts = [random_tokens(4, seed=1), random_tokens(70, seed=2)]
    driver = Driver(v3, blocks=[[3], [0, 2]])
    driver.logits(texts, [range(len(text) - 1) for text in texts])
    decoded = driver.logits(texts, [range(len(text) - 1, len(text)) for text in texts], decode=True)
    alone = torch.stack([whole_logits(v3, text)[-1] for text in texts])
    torch.testing.assert_close(decoded, alone, rtol=0, atol=1e-5)


def test_hidden_state_before_the_last_norm_is_returned(tmp_path):
    reference = make_reference(V3)
    model = load_model(save(reference, tmp_path))
    tokens = random_tokens(20)
    normalized, before = Driver(model).hidden([tokens], [range(20)])
    captured = []
    reference.model.norm.register_forward_hook(lambda module, inputs, output: captured.extend([inputs[0], output]))
    reference_logits(reference, tokens)
    torch.testing.assert_close(before, captured[0][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(normalized, captured[1][0], rtol=0, atol=1e-4)
    assert not torch.allclose(before, normalized, atol=0.1)


def test_c42_float16_is_refused(tmp_path):
    folder = save(make_reference(V3 | {"num_hidden_layers": 1}), tmp_path)
    with pytest.raises(ValueError, match=r"float16 .*use bf16 or fp32"):
        load_model(folder, dtype="int8", activation_dtype=torch.float16, say=lambda line: None)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_c42_a_hidden_value_of_70000_stays_finite_through_a_layer_in_bf16(tmp_path, dtype):
    folder = save(make_reference(V3 | {"num_hidden_layers": 2}), tmp_path)
    model = load_model(folder, dtype=dtype, say=lambda line: None)
    tokens = [1, 2, 3]
    model.embed_tokens.weight.data[2, 5] = 70_000.0  # above float16's 65,504
    normalized, before = Driver(model).hidden([tokens], [range(3)])
    assert before.dtype == torch.bfloat16
    assert before[1, 5] > 65_504
    assert before.isfinite().all()
    assert model.logits(normalized).isfinite().all()


# Every expert is chosen, so that rounding cannot flip a choice: what is left is smooth.
ALL_EXPERTS = V3 | {
    "num_hidden_layers": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "rope_parameters": PLAIN_ROPE,  # YaRN's temperature would sharpen the softmax
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """(folder of an INT8 checkpoint, transformers' fp32 model with the same, dequantized, weights)."""
    base = tmp_path_factory.mktemp("quantized")
    save(make_reference(ALL_EXPERTS), base / "fp32")
    quantized_copy(base / "fp32", base / "int8", base / "dequantized")
    return base / "int8", load_reference(base / "dequantized")


@pytest.mark.parametrize("accumulator", ["int32", "fp32"])
def test_int8_stays_within_the_noise_of_its_activations(quantized, accumulator):
    """The weights are the same, so only the rounding of activations differs; how much that may be is derived here.

    A row's values are rounded to multiples of amax / 127: an error uniform within half a step, of root mean square
    amax / 127 / sqrt(12), hence relative to the row amax / rms / 440. On average amax / rms is 2.4 to 2.7 for 32 to 96
    Gaussian values and 3.7 to 5 for h = silu(gate) * up: with 4 for all of them, r = 4 / 440 = 0.9 %. A linear layer
    with random weights passes a relative error on unchanged, and errors of different layers are independent, so they
    add in quadrature. On a token's way lie 6 quantized linears a layer (q_a, q_b, kv_a, o, gate_up, down), 12 in all:
    r * sqrt(12) = 3.1 %. The residual stream dilutes what the branches add, which only helps; silu, the product
    gate * up (both noisy) and the softmax amplify, each by less than 2 while scores are of order one. Margin 2: 6 %.
    """
    folder, reference = quantized
    model = load_model(folder, activation_dtype=torch.float32, accumulator=accumulator)
    assert model.layers[0].self_attn.o_proj.weight.dtype == torch.int8
    tokens = random_tokens(100)
    expected = reference_logits(reference, tokens)
    error = (whole_logits(model, tokens) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.06
    assert error > 0.002  # activations are rounded at all: this is w8a8, not w8


def test_dequantized_while_loading_equals_transformers(quantized):
    folder, reference = quantized
    tokens = random_tokens(30)
    logits = whole_logits(load_model(folder, dtype="fp32"), tokens)
    torch.testing.assert_close(logits, reference_logits(reference, tokens), rtol=0, atol=1e-4)
