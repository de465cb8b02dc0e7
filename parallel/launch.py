"""What every script needs at its ends, alone and under torchrun: its arguments, one line for an error, its versions."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import NoReturn

import torch
import torch.distributed as dist

from moe_int8.parallel.groups import close_groups


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults where there are any, and the description as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one line for a wrong command line, said once on each node, and defaults in --help.

    Args:
        description: the script's docstring, which ends in an example.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=_HelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        if _speaks_for_node():
            print(f"error: {message}; {self.prog} --help lists the options", file=sys.stderr)
        sys.exit(2)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an expected error into one line on stderr and exit status 1; leave the process groups in any case.

    Before the ranks have met they all see the same command line and files, so the first of each node speaks for all;
    afterwards every rank that fails says so itself.
    """
    try:
        yield
    except (ValueError, OSError, ArithmeticError, ImportError) as error:
        met = dist.is_initialized()
        if met or _speaks_for_node():
            rank = f" [rank {dist.get_rank()}]" if met else ""
            print(f"error{rank}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        if met:
            os._exit(1)  # leaving the group cleanly could wait minutes for a peer that will never answer
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    close_groups()


def first_rank() -> bool:
    """Whether this process is rank 0 of torchrun, or the only one: the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def versions() -> str:
    """The versions that a bug report needs, in one line."""
    line = f"moe-int8 {metadata.version('moe-int8')}, torch {torch.__version__}"
    try:
        line += f", triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        line += ", no triton"
    return line + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", cpu")


def _speaks_for_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
