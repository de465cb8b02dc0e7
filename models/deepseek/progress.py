"""Progress bars, for a terminal and for a log file."""

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(**options: Any) -> tqdm:
    """A tqdm bar; where stderr is no terminal, a line every half minute, and none for work that is soon done."""
    if sys.stderr.isatty():
        return tqdm(dynamic_ncols=True, **options)
    line = "{desc}: {percentage:3.0f}%, {n_fmt} of {total_fmt}, {rate_fmt}, {elapsed}<{remaining}\n"
    return tqdm(**options | {"mininterval": 30, "delay": 30, "leave": True, "bar_format": line})
