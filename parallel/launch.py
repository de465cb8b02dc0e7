"""What every script needs at its ends, alone and under torchrun: its arguments, one line for an error, its versions."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import NoReturn

import torch

from moe_int8.parallel.groups import close_groups
from moe_int8.parallel.meeting import (
    MeetingError,
    current_meeting,
    exchange,
    first_line,
    local_rank,
    meet,
    part,
    world_size,
)

GRACE = 3.0  # seconds; the watch hears of a peer's end at once, a collective that needed the peer perhaps a bit earlier


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
        _fail(f"{message}; {self.prog} --help lists the options", status=2)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an expected error into one line on stderr and exit status 1, and leave the process groups at the end.

    Under torchrun the other ranks are told, and end too. Until all have agreed to load they see the same command line
    and files and mostly fail alike, so the first of each node speaks for all; afterwards every rank says what it knows.
    """
    try:
        yield
        close_groups()
    except (ValueError, OSError, ArithmeticError, ImportError) as error:
        _fail(" ".join(str(error).split()))
    except MeetingError as error:
        if current_meeting() is None:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            _end_together(f"error: {error}" if local_rank() == 0 else "")
        _exit(1)
    except KeyboardInterrupt:
        meeting = current_meeting()
        if meeting is None or local_rank() == 0:
            print("interrupted", file=sys.stderr, flush=True)
        if meeting is not None:
            meeting.watch.tell("interrupted")
        _exit(130)
    except Exception as error:
        if world_size() == 1:
            raise
        if isinstance(error, RuntimeError):
            time.sleep(GRACE)  # a peer may be the cause; then its name and message end this process meanwhile
        if _in_collective(error):
            _fail(f"the ranks have lost each other, one is stuck or the network is down: {first_line(error)}")
        traceback.print_exc()
        _fail(f"{type(error).__name__}: {first_line(error)}")


def say(line: str) -> None:
    """Print a line for the user on stderr, once for all ranks."""
    if first_rank():
        print(line, file=sys.stderr, flush=True)


def first_rank() -> bool:
    """Whether this process is rank 0 of torchrun, or the only one: the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def packages() -> dict[str, str]:
    """The versions that results depend on, by package."""
    found = {"moe-int8": metadata.version("moe-int8"), "torch": torch.__version__}
    try:
        return found | {"triton": metadata.version("triton")}
    except metadata.PackageNotFoundError:
        return found | {"triton": "none"}


def versions() -> str:
    """The versions that a bug report needs, in one line."""
    line = ", ".join(f"{name} {version}" for name, version in packages().items()).replace("triton none", "no triton")
    return line + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", cpu")


def options(args: argparse.Namespace, but: Sequence[str]) -> dict[str, object]:
    """The command line as typed, by option; without those of `but`, which may differ from node to node."""
    return {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in but}


def _fail(message: str, status: int = 1) -> NoReturn:
    """Say in one line what is wrong and end, with all other ranks."""
    meeting = current_meeting()
    if world_size() == 1:
        print(f"error: {message}", file=sys.stderr, flush=True)
    elif meeting is not None and meeting.agreed:
        print(f"error [rank {meeting.rank}]: {message}", file=sys.stderr, flush=True)
        meeting.watch.tell(message)
    else:
        _fail_before_agreement(message)
    _exit(status)


def _fail_before_agreement(message: str) -> None:
    """Bring the error to where the other ranks bring their settings, or errors of their own."""
    first = local_rank() == 0
    if first:
        print(f"error: {message}", file=sys.stderr, flush=True)
    line = f"error [rank {os.environ.get('RANK', '?')}]: {message}"
    try:
        meet()
        meeting = current_meeting()
        assert meeting is not None
        outcomes = exchange({"error": message}, meeting.join_timeout)
        said = outcomes[meeting.rank - local_rank()].get("error")
        _end_together("" if said == message else line)
    except MeetingError:  # the others do not come, or are busy; what matters is this rank's own message
        if not first:
            print(line, file=sys.stderr, flush=True)
        if (meeting := current_meeting()) is not None:
            meeting.watch.tell(message)


def _end_together(line: str) -> None:
    """Print a line, if there is one, and wait for all ranks to do so: torchrun ends a whole node after one rank."""
    if line:
        print(line, file=sys.stderr, flush=True)
    with suppress(TimeoutError):
        part(GRACE)


def _exit(status: int) -> NoReturn:
    if world_size() == 1:
        sys.exit(status)
    sys.stdout.flush()
    os._exit(status)  # leaving the process group cleanly could wait minutes for a peer that will never answer


def _in_collective(error: Exception) -> bool:
    """Whether an exception was raised inside torch.distributed."""
    return "/torch/distributed/" in traceback.extract_tb(error.__traceback__)[-1].filename
