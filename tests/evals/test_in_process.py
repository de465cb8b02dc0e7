"""From prompts to batches of token ids: shots that do not fit, the letters' tokens, and work that is left."""

import pytest
from byte_tokenizer import write_tokenizer
from eval_fakes import BOS, LETTERS, write_letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from moe_int8.evals.in_process import Encoded, Texts, choice_tokens, common_length, encode, plan
from moe_int8.evals.mmlu import CHOICES
from moe_int8.evals.prompts import Prompt
from moe_int8.models.deepseek.text import load_tokenizer

PROMPT = Prompt((("Q 1", " one"), ("Q 2", " two")), "Q 3", intro="intro ")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters")
    write_letter_tokenizer(folder)
    return load_tokenizer(folder)


def test_c69_both_styles_begin_with_one_bos(tokenizer):
    for chat in (False, True):
        ids = encode(tokenizer, PROMPT, chat=chat, room=0, context=1000).ids
        assert ids[0] == BOS
        assert ids.count(BOS) == 1


@pytest.mark.parametrize("short, dropped", [(0, 0), (1, 1), (9, 1), (10, 2), (30, 2)])
def test_shots_that_do_not_fit_are_dropped_from_the_front(tokenizer, short, dropped):
    whole = len(encode(tokenizer, PROMPT, chat=False, room=0, context=1000).ids)
    assert len("Q 1 one\n\n") == 9  # a token a byte: so much room does each shot give
    encoded = encode(tokenizer, PROMPT, chat=False, room=20, context=whole + 20 - short)
    assert encoded.dropped == dropped
    assert tokenizer.decode(encoded.ids[1:]) == PROMPT.text(dropped)


def test_the_template_that_opens_a_think_block_is_seen(tokenizer):
    assert not encode(tokenizer, PROMPT, chat=True, room=0, context=1000).thinking
    template = tokenizer.chat_template
    tokenizer.chat_template = template + "<think>\n"
    try:
        assert encode(tokenizer, PROMPT, chat=True, room=0, context=1000).thinking
        assert not encode(tokenizer, PROMPT, chat=False, room=0, context=1000).thinking
    finally:
        tokenizer.chat_template = template


def test_c68_the_letters_are_taken_with_their_space(tokenizer):
    assert choice_tokens(tokenizer, "Answer:", CHOICES) == list(LETTERS.values())
    assert tokenizer.encode("A", add_special_tokens=False)[0] not in LETTERS.values()


def test_c68_a_letter_of_two_tokens_is_an_error(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"no token of its own of ' A' .*--generate"):
        choice_tokens(load_tokenizer(tmp_path), "Answer:", CHOICES)


def test_c68_a_letter_that_changes_the_token_before_it_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="no token of its own of 'A'"):
        choice_tokens(tokenizer, "Answer: ", ("A",))  # the space and the letter become one


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6))
def test_the_common_length_leaves_each_prompt_a_token(prompts):
    length = common_length(prompts)
    shortest = min(map(len, prompts))
    assert 0 <= length < shortest
    assert len({tuple(prompt[:length]) for prompt in prompts}) == 1
    assert length == shortest - 1 or len({tuple(prompt[: length + 1]) for prompt in prompts}) > 1


def encoded(*tokens, dropped=0):
    return Encoded(list(tokens), dropped, False)


def test_batches_are_fixed_by_index_whatever_is_done():
    prompts = [encoded(1, index) for index in range(7)]
    groups = ["all"] * 7
    whole = plan(prompts, groups, set(), parallel=3, score=False)
    assert [job.indices for job in whole] == [[0, 1, 2], [3, 4, 5], [6]]
    left = plan(prompts, groups, {0, 1, 2, 4, 6}, parallel=3, score=False)
    assert left == [whole[1]]
    assert plan(prompts, groups, set(range(7)), parallel=3, score=False) == []


def test_scoring_goes_by_subject_and_number_of_shots_with_one_beginning():
    prompts = [encoded(1, 2, 3, index) for index in range(5)] + [encoded(1, 5, index) for index in range(3)]
    prompts[1] = encoded(1, 9, dropped=1)
    prompts[3], prompts[4] = encoded(1, 2, 3, 4, 5), encoded(1, 2, 3, 4, 6)  # alone they begin alike for longer
    jobs = plan(prompts, ["a"] * 5 + ["b"] * 3, set(), parallel=2, score=True)
    assert [(job.indices, job.shared) for job in jobs] == [([0, 2, 3, 4], 3), ([1], 1), ([5, 6, 7], 2)]
    left = plan(prompts, ["a"] * 5 + ["b"] * 3, {0, 2, 3, 5, 6}, parallel=2, score=True)
    # whole batches, and the beginning that all the subject's questions share, as in an uninterrupted run
    assert [(job.indices, job.shared) for job in left] == [([3, 4], 3), ([1], 1), ([7], 2)]


def test_c76_c77_texts_are_whole_characters_cut_at_a_stop_string_over_tokens(tokenizer):
    texts = Texts(tokenizer, ("END",), 2)
    tokens = tokenizer.encode("a\N{GRINNING FACE}bENDx", add_special_tokens=False)
    stopped = [texts.watch(0, token) for token in tokens]
    assert stopped.index(True) == len("a\N{GRINNING FACE}bEND".encode()) - 1
    for token in tokenizer.encode("abEN", add_special_tokens=False):
        assert not texts.watch(1, token)
    assert texts.finish() == ["a\N{GRINNING FACE}b", "abEN"]
