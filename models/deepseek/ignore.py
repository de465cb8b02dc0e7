"""The `ignore` list of compressed-tensors: which modules of a checkpoint are not quantised."""

import fnmatch
import re
from typing import Any

from moe_int8.models.deepseek.untrusted import shown

PATTERN = "re:"  # begins an entry that is a regular expression, matched from the start of the module's name
MOST_PATTERNS = 64
_KNOWN = re.compile(r"\^?(?P<body>(?:\w|-|\\\.|\.\*?)*)(?P<end>\$?)", re.ASCII)


class IgnoreList:
    """Names and patterns of modules.

    A pattern may hold names, `.`, `.*`, `\\.` and a final `$`. It comes from the checkpoint, and Python's own regular
    expressions can be made to run for ever; these become globs, whose time is bounded.

    Raises:
        ValueError: `entries` is no list of strings, or holds another pattern or too many; names it.
    """

    def __init__(self, entries: Any) -> None:
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise ValueError(f"ignore must be a list of names, got {shown(entries)}")
        self._names = {entry for entry in entries if not entry.startswith(PATTERN)}
        patterns = [entry for entry in entries if entry.startswith(PATTERN)]
        if len(patterns) > MOST_PATTERNS:
            raise ValueError(f"ignore holds {len(patterns)} patterns, more than {MOST_PATTERNS}: list names instead")
        self._patterns = [re.compile(fnmatch.translate(_glob(entry))) for entry in patterns]

    def __contains__(self, module: str) -> bool:
        return module in self._names or any(pattern.match(module) for pattern in self._patterns)


def _glob(entry: str) -> str:
    known = _KNOWN.fullmatch(entry.removeprefix(PATTERN))
    if known is None:
        raise ValueError(
            f"the ignore entry {shown(entry)} is not supported: a pattern may hold names, '.', '.*', '\\.' and a "
            "final '$'; list the modules' names instead"
        )
    body = re.sub(r"\\\.|\.\*|\.", lambda part: {"\\.": ".", ".*": "*", ".": "?"}[part[0]], known["body"])
    return body if known["end"] else f"{body}*"
