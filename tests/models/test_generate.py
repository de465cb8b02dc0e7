import pytest
import torch
from tiny import V3, VOCAB, make_reference, random_tokens, reference_logits, save, whole_logits

from moe_int8.models.deepseek.cache import BLOCK_SIZE
from moe_int8.models.deepseek.generate import Completion, Generator
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.weights import load_model


@pytest.fixture(scope="module")
def reference():
    return make_reference(V3 | {"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory):
    return load_model(save(reference, tmp_path_factory.mktemp("model")))


def generate(model, prompts, max_batch=4, max_model_len=128, watch=None, prefill_chunk=2048, **params):
    generator = Generator(model, max_batch, max_model_len, prefill_chunk)
    completions = generator.generate(prompts, SamplingParams(**params), watch=watch)
    assert sorted(generator.cache.free) == list(range(generator.cache.pool.shape[1]))
    return completions


def test_greedy_tokens_equal_those_of_transformers(model, reference):
    tokens = random_tokens(9)
    expected = []
    for _ in range(6):
        expected.append(int(reference_logits(reference, tokens + expected)[-1].argmax()))
    assert generate(model, [tokens], max_new_tokens=6) == [Completion(expected, "length")]


def test_c44_a_sequence_that_reaches_the_context_ends_there(model):
    generator = Generator(model, max_batch=1, max_model_len=8)
    prompt = random_tokens(6)
    (completion,) = generator.generate([prompt], SamplingParams(max_new_tokens=5))
    (unlimited,) = generate(model, [prompt], max_new_tokens=5)
    assert completion == Completion(unlimited.tokens[:2], "length")
    pool = generator.cache.pool
    assert pool.shape[1] * BLOCK_SIZE == 64
    assert pool[:, 0, :7].any(dim=-1).all()  # the last token is never run
    assert not pool[:, 0, 7:].any()
    assert generator.generate([prompt], SamplingParams(max_new_tokens=5)) == [completion]  # and it lives on


@pytest.mark.parametrize("length", [8, 9])
def test_c44_a_prompt_that_does_not_fit_is_refused(model, length):
    with pytest.raises(ValueError, match=rf"prompt 1 has {length} tokens .* context of 8"):
        generate(model, [[1], random_tokens(length)], max_model_len=8)


def test_c79_the_limit_is_length_and_the_end_token_is_stop(model):
    prompt = random_tokens(5)
    (unlimited,) = generate(model, [prompt], max_new_tokens=5)
    assert unlimited.finish_reason == "length"
    assert len(unlimited.tokens) == 5
    end = unlimited.tokens[2]
    assert end not in unlimited.tokens[:2]
    (stopped,) = generate(model, [prompt], max_new_tokens=5, eos_token_ids=(VOCAB - 1, end))
    assert stopped == Completion(unlimited.tokens[:3], "stop")  # the end token once, as the last
    (ignored,) = generate(model, [prompt], max_new_tokens=5, eos_token_ids=(end,), ignore_eos=True)
    assert ignored == unlimited


def test_c79_an_end_token_at_the_limit_is_stop(model):
    prompt = random_tokens(5)
    (unlimited,) = generate(model, [prompt], max_new_tokens=3)
    assert generate(model, [prompt], max_new_tokens=3, eos_token_ids=(unlimited.tokens[2],)) == [
        Completion(unlimited.tokens, "stop")
    ]


PROMPTS = [random_tokens(length, seed=length) for length in (3, 70, 1, 12, 64, 5, 33)]


@pytest.mark.parametrize("max_batch, prefill_chunk", [(1, 2048), (2, 2048), (3, 16), (7, 50)])
def test_a_queue_of_prompts_gives_the_tokens_of_each_alone(model, max_batch, prefill_chunk):
    """Sequences end at different steps, so that others take their places and blocks in the midst."""
    ends = tuple(range(0, VOCAB, 5))
    alone = [generate(model, [prompt], max_new_tokens=12, eos_token_ids=ends)[0] for prompt in PROMPTS]
    assert len({len(completion.tokens) for completion in alone}) > 2
    queued = generate(model, PROMPTS, max_batch, prefill_chunk=prefill_chunk, max_new_tokens=12, eos_token_ids=ends)
    assert queued == alone


def test_a_block_is_never_held_by_two(model):
    generator = Generator(model, max_batch=2, max_model_len=128)
    pool_size = generator.cache.pool.shape[1]
    held: list[int] = []
    take, give_back = generator.cache.take, generator.cache.give_back

    def spy_take(count):
        taken = take(count)
        held.extend(taken or [])
        assert len(set(held)) == len(held) <= pool_size
        return taken

    def spy_give_back(blocks):
        for block in blocks:
            held.remove(block)
        give_back(blocks)

    generator.cache.take, generator.cache.give_back = spy_take, spy_give_back
    generator.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    assert held == []  # each sequence returned its own


def test_watch_stops_a_sequence_and_sees_every_token_once(model):
    seen: list[tuple[int, int]] = []

    def watch(index: int, token: int) -> bool:
        seen.append((index, token))
        return index == 1 and sum(i == 1 for i, _ in seen) == 3

    prompts = PROMPTS[:3]
    unwatched = generate(model, prompts, max_new_tokens=6)
    watched = generate(model, prompts, watch=watch, max_new_tokens=6)
    assert watched == [unwatched[0], Completion(unwatched[1].tokens[:3], "stop"), unwatched[2]]
    for index, completion in enumerate(watched):
        assert [token for i, token in seen if i == index] == completion.tokens


def test_sampling_does_not_depend_on_the_batch(model):
    def sampled(seed: int, max_batch: int) -> list[list[int]]:
        params = {"temperature": 1.0, "top_p": 0.9, "seed": seed, "max_new_tokens": 8}
        return [completion.tokens for completion in generate(model, PROMPTS, max_batch, **params)]

    one = sampled(seed=1, max_batch=1)
    assert sampled(seed=1, max_batch=3) == one
    assert sampled(seed=1, max_batch=7) == one
    assert sampled(seed=2, max_batch=7) != one


def test_sequences_of_one_prompt_draw_their_own_numbers(model):
    first, second = generate(model, [PROMPTS[0]] * 2, temperature=2.0, max_new_tokens=8)
    assert first.tokens != second.tokens


@pytest.fixture
def broken(reference, tmp_path):
    """A model whose logits are NaN for texts that hold token 7."""
    model = load_model(save(reference, tmp_path))
    model.embed_tokens.weight.data[7] = float("nan")
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error_and_the_blocks_come_back(broken, temperature):
    generator = Generator(broken, max_batch=2, max_model_len=128)
    params = SamplingParams(max_new_tokens=4, temperature=temperature)
    (expected,) = generator.generate([[1, 2]], params)
    for prompts in ([[7]], [[1, 2], [3], [7], [4]]):
        with pytest.raises(FloatingPointError, match="logits are not numbers"):
            generator.generate(prompts, params)
        assert sorted(generator.cache.free) == list(range(generator.cache.pool.shape[1]))
    assert generator.generate([[1, 2]], params) == [expected]  # the NaN left in the cache does not leak


def test_a_failing_watch_leaves_the_generator_usable(model):
    generator = Generator(model, max_batch=2, max_model_len=128)

    def watch(index: int, token: int) -> bool:
        raise RuntimeError("the user went away")

    with pytest.raises(RuntimeError, match="went away"):
        generator.generate(PROMPTS, SamplingParams(max_new_tokens=4), watch=watch)
    completions = generator.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    assert completions == generate(model, PROMPTS, max_new_tokens=4)


def test_what_cannot_be_run_is_refused(model):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(model, [[1], []])
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match=rf"prompt 0 holds a token id outside 0\.\.{VOCAB - 1}"):
            generate(model, [[1, token]])
    for prompt in (None, "ab", 5, ["a"], [1.0], [True], [[1]], {1: 2}):
        with pytest.raises(ValueError, match="prompt 0 must be a sequence of whole numbers"):
            generate(model, [prompt])
    for name in ("max_batch", "max_model_len", "prefill_chunk"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            generate(model, [[1]], **{name: 0})
    with pytest.raises(ValueError, match="max_model_len = 257 is beyond the model's context of 256"):
        generate(model, [[1]], max_model_len=257)


def test_the_last_token_of_the_vocabulary_may_be_prompted(model):
    assert len(generate(model, [[VOCAB - 1]], max_new_tokens=1)[0].tokens) == 1


def test_no_prompts_no_completions(model):
    assert generate(model, []) == []


def test_speed_counts_what_was_run(model):
    generator = Generator(model, max_batch=2, max_model_len=128)
    generator.generate([[1, 2, 3], [4]], SamplingParams(max_new_tokens=5))
    assert generator.speed.prefill_tokens == 4
    assert generator.speed.decode_tokens == 2 * 4  # the first token of each comes from its prefill
    assert "4 tokens in" in str(generator.speed)


def test_score_gives_the_logits_after_every_token(model):
    tokens = random_tokens(70)
    generator = Generator(model, max_batch=1, max_model_len=70, prefill_chunk=32)
    torch.testing.assert_close(generator.score(tokens), whole_logits(model, tokens), rtol=0, atol=1e-5)
    assert sorted(generator.cache.free) == [0, 1]
    with pytest.raises(ValueError, match="has 71 tokens"):
        generator.score(random_tokens(71))
