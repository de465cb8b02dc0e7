"""What test_fuzz.py is made of: broken files and requests, and what the answer to them must be."""

import copy
import json
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from moe_int8.models.deepseek.checkpoint import DTYPES, CheckpointError
from moe_int8.models.deepseek.config import ConfigError

MOST_SECONDS = 20  # of processor time; an input takes milliseconds
MOST_WAITING = 300  # seconds on the clock, for what hangs and does nothing; a machine under load never needs this
MOST_MEMORY = 128 << 20  # the checkpoints have 0.2 MB, a refused file is read up to 32 MB
MOST_MESSAGE = 1200  # characters: folder, file, tensor, what was found and what to do
PAGE = resource.getpagesize()

INTEGERS = st.sampled_from([0, 1, 2, 3, 7, 64, 2**16, 2**31 - 1, 2**31, 2**63, 10**9, 10**15, 10**400]) | st.integers()
TEXTS = st.text(max_size=6) | st.sampled_from(
    ["\ud800", "x" * 5000, "\n\x1b[2J", "../config.json", "model.safetensors"]
)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)
RAW_VALUES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "[" * 100_000,
    '{"a":' * 2000,
    "9" * 5000,
    '{"a":1,"a":2}',
    "",
    "nul",
]


def refused(action: Callable[[], object]) -> bool:
    """Whether `action` ends in one of our errors; asserts that it is one readable line, soon and with little memory.

    Any other exception passes through: that is what the fuzz tests look for.
    """
    with _little_time(), _little_memory():
        try:
            action()
        except (ConfigError, CheckpointError, ValueError) as error:
            if type(error) not in (ConfigError, CheckpointError, ValueError):
                raise  # a UnicodeDecodeError, say, is a ValueError too
            message = str(error)
            assert message.isprintable(), repr(message)
            assert 10 < len(message) < MOST_MESSAGE, message
            return True
    return False


@contextmanager
def _little_time() -> Iterator[None]:
    def stop(number: int, _: object) -> None:
        raise TimeoutError(
            f"more than {MOST_SECONDS} s of work" if number == signal.SIGPROF else f"more than {MOST_WAITING} s"
        )

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    signal.alarm(MOST_WAITING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _little_memory() -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory("VmRSS")
    yield
    grown = _memory("VmHWM") - before
    assert grown < MOST_MEMORY, f"{grown >> 20} MB were taken"


def _memory(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


# documents


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values in a JSON document, inner ones included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*path, key) for key, _ in inner] + [way for key, v in inner for way in paths_of(v, (*path, key))]


@st.composite
def changed_json(draw: st.DrawFn, document: dict[str, Any], values: st.SearchStrategy[Any] = VALUES) -> bytes:
    """`document` with one to three values replaced, removed, added or written twice, or with text that is no JSON."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        path = draw(st.sampled_from(paths_of(document) or [()]))
        if not path:
            break
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        change = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "swap"]))
        if change == "replace":
            holder[path[-1]] = copy.deepcopy(draw(values))  # what is drawn may be drawn again: it stays as it is
        elif change == "remove":
            del holder[path[-1]]
        elif change == "add" and isinstance(holder, dict):
            holder[draw(TEXTS)] = copy.deepcopy(draw(values))
        elif change == "swap":
            other = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
            holder[path[-1]], holder[other] = holder[other], holder[path[-1]]
    text = json.dumps(document)
    raw = draw(st.sampled_from(["", "", "", "", "value", "twice", "bytes"]))
    if raw == "value":  # something that json.dumps would not write
        ends = [match.end() for match in re.finditer(": ", text)]
        if ends:
            at = draw(st.sampled_from(ends))
            text = text[:at] + draw(st.sampled_from(RAW_VALUES)) + re.sub(r"^[^,}]*", "", text[at:])
    elif raw == "twice" and document:
        key = draw(st.sampled_from(list(document)))
        text = f"{{{json.dumps(key)}: {json.dumps(draw(values))}, {text[1:]}"
    elif raw == "bytes":
        return draw(changed_bytes(text.encode()))
    return text.encode()


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes, most: int | None = None) -> bytes:
    """`data` with one to three places flipped, overwritten, cut out or filled in, or the end cut off.

    Args:
        most: only places before it.
    """
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        at = draw(st.integers(0, min(len(data), most or len(data))))
        change = draw(st.sampled_from(["flip", "flip", "write", "insert", "remove", "cut", "append"]))
        if change == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif change == "write":
            new = draw(st.binary(min_size=1, max_size=9))
            data = data[:at] + new + data[at + len(new) :]
        elif change == "insert":
            data = data[:at] + draw(st.binary(min_size=1, max_size=9)) + data[at:]
        elif change == "remove":
            data = data[:at] + data[at + draw(st.integers(1, 100)) :]
        elif change == "cut":
            data = data[:at]
        else:
            data += draw(st.binary(min_size=1, max_size=9))
    return data


# shards

_SIZES = st.sampled_from([0, 1, 2, 16, 32, 64, 65, -1, 1.5, 2**32, 10**15, 2**63, 2**64, "64", None, True, [1]])
_HEADER_VALUES = (
    st.sampled_from([*DTYPES, "F8_E5M2", "F4", "f32", "C64"])
    | st.lists(_SIZES, max_size=4)
    | st.fixed_dictionaries(
        {"dtype": st.sampled_from([*DTYPES]), "shape": st.lists(_SIZES, max_size=3), "data_offsets": st.just([0, 64])}
    )
    | _SIZES
    | VALUES
)
_LENGTHS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 7, 2**31, 2**63, 2**64 - 1, 100_000_000, 33 << 20])


@st.composite
def changed_shard(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file whose header, its length, or any bytes are changed."""
    kind = draw(st.sampled_from(["header", "header", "header", "offsets", "length", "bytes", "anywhere"]))
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    if kind == "anywhere":
        return draw(changed_bytes(data))
    if kind == "bytes":
        return draw(changed_bytes(data, most=8 + size))
    if kind == "length":
        return draw(_LENGTHS).to_bytes(8, "little") + data[8:]
    document = json.loads(header)
    if kind == "offsets":
        names = st.sampled_from([name for name in document if name != "__metadata__"])
        one, other = document[draw(names)], document[draw(names)]
        if draw(st.booleans()):
            one["data_offsets"] = other["data_offsets"]  # two on the same bytes
        else:
            shift = draw(st.integers(-len(rest), len(rest)))
            one["data_offsets"] = [offset + shift for offset in one["data_offsets"]]
        text = json.dumps(document).encode()
    else:
        text = draw(changed_json(document, _HEADER_VALUES))
    return len(text).to_bytes(8, "little") + text + rest
