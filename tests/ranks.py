"""Ranks of one run as forked processes, each with a command line and an environment of its own.

Forked, because importing torch once more for each would take most of the tests' time.
"""

import importlib.util
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).parents[1]
LIMIT = 60.0  # seconds in which all ranks have ended, whatever happens to one


def load_script(name: str) -> ModuleType:
    """scripts/<name>.py as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Ranks:
    """Ranks that run a script's main.

    Args:
        main: takes a command line; forked as it is here and now, with whatever a test has patched.
        commands: a command line for each rank, None for one that does not start.
        folder: for what they print.
        environment: over what torchrun would set for ranks of one node.
    """

    def __init__(
        self,
        main: Callable[[list[str]], None],
        commands: Sequence[Sequence[object] | None],
        folder: Path,
        **environment: str,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        context = multiprocessing.get_context("fork")
        self.start = time.monotonic()
        self.processes: dict[int, BaseProcess] = {}
        self.outputs: dict[int, Path] = {}
        for rank, command in enumerate(commands):
            if command is None:
                continue
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": len(commands),
                "LOCAL_WORLD_SIZE": len(commands),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.port,
                "GLOO_SOCKET_IFNAME": "lo",
            }
            self.outputs[rank] = folder / f"rank{rank}"
            for suffix in (".out", ".err"):
                self.outputs[rank].with_suffix(suffix).write_text("")
            arguments = (main, list(map(str, command)), self.outputs[rank], variables | environment)
            self.processes[rank] = context.Process(target=_run, args=arguments)
            self.processes[rank].start()

    def out(self, rank: int) -> str:
        """What a rank has printed to stdout so far."""
        return self.outputs[rank].with_suffix(".out").read_text(errors="replace")

    def err(self, rank: int) -> str:
        """What a rank has printed to stderr so far."""
        return self.outputs[rank].with_suffix(".err").read_text(errors="replace")

    def errors(self, rank: int) -> list[str]:
        """A rank's lines that are an error; a progress bar may stand in front of one."""
        return [line[line.index("error") :] for line in self.err(rank).splitlines() if "error" in line]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has happened in the ranks, which must not end before."""
        while not condition():
            ended = {rank: process.exitcode for rank, process in self.processes.items() if process.exitcode is not None}
            assert not ended, f"ended early: {ended}, {[self.err(rank) for rank in ended]}"
            assert time.monotonic() - self.start < LIMIT
            time.sleep(0.02)

    def exit_codes(self) -> dict[int, int | None]:
        """Wait for all ranks; None is one that has not ended within LIMIT seconds. None is left behind."""
        deadline = time.monotonic() + LIMIT
        for process in self.processes.values():
            process.join(max(deadline - time.monotonic(), 0))
        codes = {rank: process.exitcode for rank, process in self.processes.items()}
        self.kill()
        return codes

    def kill(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            process.kill()
            process.join()


def _run(main: Callable[[list[str]], None], command: list[str], output: Path, variables: dict[str, object]) -> None:
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_WRONLY), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.environ |= {name: str(value) for name, value in variables.items()}
    torch.set_num_threads(1)  # makes torch's thread pool anew, which threads of a forked process would do all at once
    main(command)
