"""JSON that is refused, and what a message may show of it."""

import pytest

from moe_int8.models.deepseek import untrusted
from moe_int8.models.deepseek.untrusted import brief, check_name, parse_json, read_json, shown


def test_json_is_read_as_it_is():
    text = b'{"a": [1, -2.5, true, null, {"b": "\\u00e9\\ud83d\\ude00"}], "c": {"a": 1e3}}'
    assert parse_json(text) == {"a": [1, -2.5, True, None, {"b": "é😀"}], "c": {"a": 1000.0}}


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "^is no JSON: "),
        ("", "^is no JSON: "),
        ("{} x", "^is no JSON: "),
        ('{"a": ' + "9" * 5000 + "}", "^is no JSON: "),  # Python refuses to parse a number of so many digits
        ("[1]", "^must hold a JSON object, got list$"),
        ("null", "^must hold a JSON object, got NoneType$"),
        ('{"a": NaN}', "^holds NaN, which is not JSON$"),
        ('{"a": [{"b": -Infinity}]}', "^holds -Infinity, which is not JSON$"),
        ('{"a": 1, "b": 2, "a": 1}', "^holds the key 'a' twice$"),
        ('{"x": [{"y": {"a\\n": 1, "a\\n": 2}}]}', r"^holds the key 'a\\n' twice$"),
        ('{"a": ' + "[" * 100_000, "^is nested too deeply$"),
        ('{"a": ' * 100_000, "^is nested too deeply$"),
    ],
    ids=range(12),
)
def test_what_is_no_json_object_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text.encode())


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ValueError, match=r"^is no JSON: .*0xff"):
        parse_json(b'{"a": "\xff"}')


def test_a_file_is_named_and_its_size_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "some.json"
    with pytest.raises(ValueError, match=r"some\.json cannot be read: No such file"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"some\.json must hold a JSON object"):
        read_json(path)
    monkeypatch.setattr(untrusted, "MAX_JSON_BYTES", 2 << 20)
    content = '{"a": 1}'
    path.write_text(content + " " * ((2 << 20) - len(content)))
    assert read_json(path) == {"a": 1}
    path.write_text(content + " " * ((2 << 20) + 1 - len(content)))
    with pytest.raises(ValueError, match=r"some\.json is larger than 2 MB"):
        read_json(path)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\ud800", "x" * 257, "a\u202eb"])
def test_names_that_cannot_be_printed_or_are_too_long_are_refused(name):
    with pytest.raises(ValueError, match="cannot be printed") as error:
        check_name(name)
    assert str(error.value).isprintable()
    check_name("x" * 256)


@pytest.mark.parametrize(
    "value", ["x\n" * 10_000, 10**4000, [[["a"] * 100] * 100] * 100, {"k" * 500: "\x1b"}, "\ud800"]
)
def test_values_are_shown_briefly_on_one_line(value):
    text = shown(value)
    assert len(text) < 310
    assert text.isprintable()
    assert shown("yarn") == "'yarn'"


def test_errors_of_others_are_shown_briefly_on_one_line():
    assert brief(KeyError()) == "KeyError"
    assert brief(ValueError("two\nlines")) == "two lines"
    assert len(brief(ValueError("x" * 10_000))) < 310
    assert brief(ValueError("unknown variant \x1b[2J\ud800")) == "unknown variant ?[2J?"
