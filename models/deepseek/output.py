"""The folder that a conversion writes: by one run at a time, and nothing incomplete in it ever looks complete.

A file appears under its name when it is whole and on disk, or not at all. The state file says what is converted and
how, so that the same command continues an interrupted run and another one is refused; it is locked while a run writes.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from moe_int8.models.deepseek.checkpoint import CheckpointError
from moe_int8.models.deepseek.untrusted import read_json

STATE = "moe_int8_convert.json"


@contextmanager
def open_output(out: Path, source: Path, state: dict[str, Any], results: set[str]) -> Iterator[None]:
    """Make and hold the folder `out`, and remove what runs that were killed have left in it.

    Args:
        source: the folder that is converted.
        state: what is converted ("source") and how ("settings").
        results: the names of all files that the conversion writes, but for the state's.

    Raises:
        CheckpointError: `out` cannot be written, holds something else, or is being written.
    """
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise CheckpointError(f"the result {out} lies in the source {source}: choose another folder")
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file: choose a folder for the result")
    out.mkdir(parents=True, exist_ok=True)
    begun = (out / STATE).exists()
    for path in sorted(out.iterdir()):
        if not _is_temporary(path, results) and not (begun and path.name in {*results, STATE}):
            raise CheckpointError(
                f"{out} holds {path.name}, which is not part of this conversion: choose an empty or new folder"
            )
    with _locked(out / STATE) as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            stream.write(_to_json(state))
            stream.flush()
            os.fsync(stream.fileno())
        else:
            _check_same(out, state)
        for path in out.iterdir():
            if _is_temporary(path, results):
                path.unlink()
        yield


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when it is whole and on disk, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or a power cut might take the name back
        finally:
            os.close(folder)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}): what is finished stays, the same command continues"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file, atomically."""
    with atomic(path) as stream:
        stream.write(_to_json(value))


def holds(path: Path, value: dict[str, Any]) -> bool:
    """Whether a file holds what `write_json` writes."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")) == value)
    except (OSError, ValueError):
        return False


def check_space(out: Path, needed: int) -> None:
    """Raise CheckpointError unless the disk of `out` has `needed` bytes free."""
    free = shutil.disk_usage(out).free
    if free < needed:
        needs, has = (f"{tqdm.format_sizeof(size)}B" for size in (needed, free))
        raise CheckpointError(f"{out} needs {needs} more, and its disk has {has} free")


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """A file, made if there is none, that one process at a time can hold; the lock ends with it, however it ends."""
    try:
        stream = open(path, "a+b")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error})") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another conversion is writing {path.parent}: wait until it has ended, or choose another folder"
            ) from error
        except OSError:
            pass  # some file systems of clusters have no locks; there it is the user who starts one at a time
        yield stream


def _check_same(out: Path, state: dict[str, Any]) -> None:
    try:
        earlier = read_json(out / STATE)
    except ValueError as error:
        raise CheckpointError(f"{out / STATE} is damaged: delete {out} and convert again") from error
    for part in ("source", "settings"):
        if earlier.get(part) != state[part]:
            raise CheckpointError(
                f"{out} was begun from another source or a source since changed: delete it or choose another folder"
                if part == "source"
                else f"{out} was begun with {earlier.get(part)}, not {state[part]}: use those or choose another folder"
            )


def _is_temporary(path: Path, results: set[str]) -> bool:
    match = re.fullmatch(r"\.(.+)\.tmp\d+", path.name)
    return match is not None and match[1] in results


def _to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
