"""A checkpoint's files are untrusted: their JSON is read strictly and within bounds, their values are shown briefly."""

import json
import reprlib
from pathlib import Path
from typing import Any, NoReturn

MAX_JSON_BYTES = 32 << 20  # of one file or shard header; the largest official one, R1's index, has 9 MB
MAX_NAME = 256  # characters of a tensor's name; DeepSeek's longest has 61
MOST_SHOWN = 300  # characters of a value or of another library's message

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no UTF-8; names the file.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: it cannot be read, is larger than MAX_JSON_BYTES, or not what `parse_json` takes; names the file.
    """
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MB")
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def parse_json(text: bytes) -> dict[str, Any]:
    """The JSON object that `text` is.

    Raises:
        ValueError: it is none, too deeply nested, holds NaN or Infinity (which are not JSON), or a key twice (of which
            readers take one or the other). The message begins with the verb.
    """
    try:
        value = json.loads(text.decode(), parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except _Refused:
        raise
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"must hold a JSON object, got {type(value).__name__}")
    return value


def check_name(name: str) -> None:
    """Raise ValueError unless a tensor's name can be printed on a line: no control characters, not beyond MAX_NAME."""
    if not name.isprintable() or len(name) > MAX_NAME:
        raise ValueError(f"holds the name {shown(name)}, which is too long or cannot be printed")


def shown(value: object) -> str:
    """`repr(value)`, shortened and on one line, for messages."""
    return _cut(_short.repr(value))


def brief(error: Exception) -> str:
    """What an error of another library says, shortened and on one line: it may quote the file."""
    return _cut(str(error)) or type(error).__name__


def _cut(text: str) -> str:
    text = " ".join(text[: 2 * MOST_SHOWN].split())
    text = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class _Refused(ValueError):
    """JSON for Python's parser, and not for us."""


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"holds {name}, which is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"holds the key {shown(twice)} twice")
    return made
