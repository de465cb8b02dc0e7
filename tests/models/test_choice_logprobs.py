"""Choices scored behind a shared beginning: what each prompt gets alone."""

import pytest
import torch
from tiny import V3, make_reference, random_tokens, save

from moe_int8.models.deepseek.cache import BLOCK_SIZE
from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.weights import load_model

SHARED = BLOCK_SIZE + 9  # one whole block, and tokens that each prompt runs itself
CHOICES = [7, 3, 100]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(save(make_reference(V3 | {"num_hidden_layers": 2}), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def prompts():
    return [random_tokens(SHARED) + random_tokens(length, seed=length) for length in (1, 5, 70, 30, 2)]


@pytest.mark.parametrize("prefill_chunk", [16, 2048])
@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_choices_are_scored_as_in_the_whole_text(model, prompts, max_batch, prefill_chunk):
    generator = Generator(model, max_batch, max_model_len=150, prefill_chunk=prefill_chunk)
    parts = list(generator.choice_logprobs(prompts, CHOICES, shared=SHARED))
    assert [len(part) for part in parts] == [min(max_batch, 5 - start) for start in range(0, 5, max_batch)]
    alone = [Generator(model, 1, 150).score(prompt)[-1].log_softmax(-1)[CHOICES] for prompt in prompts]
    # fp32 sums in another order: chunks and batches agree to 1e-5
    torch.testing.assert_close(torch.cat(parts), torch.stack(alone), atol=1e-5, rtol=1e-5)


def test_the_shared_blocks_are_run_once(model, prompts):
    generator = Generator(model, max_batch=2, max_model_len=150)
    run = []
    counting = model.register_forward_pre_hook(lambda _, arguments: run.append(len(arguments[0])))
    list(generator.choice_logprobs(prompts, CHOICES, shared=SHARED))
    counting.remove()
    assert sum(run) == BLOCK_SIZE + sum(len(prompt) - BLOCK_SIZE for prompt in prompts)
    assert generator.speed.prefill_tokens == sum(run)
    assert sorted(generator.cache.free) == list(range(generator.cache.pool.shape[1]))
    generator.generate(prompts, SamplingParams(max_new_tokens=2))  # and it can be used on


def test_a_whole_context_fits_and_more_does_not(model):
    generator = Generator(model, max_batch=2, max_model_len=BLOCK_SIZE)
    whole = [random_tokens(BLOCK_SIZE)] * 2
    assert torch.cat(list(generator.choice_logprobs(whole, CHOICES, shared=BLOCK_SIZE - 1))).shape == (2, 3)
    with pytest.raises(ValueError, match="prompt 0 has 65 tokens"):
        next(generator.choice_logprobs([random_tokens(BLOCK_SIZE + 1)], CHOICES))


def test_logits_that_are_no_numbers_end_the_run(model, prompts):
    weight = model.norm.weight.clone()
    model.norm.weight.data.fill_(float("nan"))
    try:
        with pytest.raises(FloatingPointError, match="not numbers"):
            next(Generator(model, 1, 150).choice_logprobs(prompts[:1], CHOICES))
    finally:
        model.norm.weight.data.copy_(weight)
