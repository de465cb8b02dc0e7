"""What can be known to be wrong on a node before torchrun starts on it, and torchrun's own command line.

A check is a function that returns what it found (`str` of it is the text of its line) or raises ValueError with what to
do. `Report` runs them.
"""

import hashlib
import ipaddress
import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_int8.parallel.launch import packages
from moe_int8.parallel.network import Doorbell, Interface, interfaces, is_own, ring
from moe_int8.parallel.nodes import Nodes

T = TypeVar("T")

PACKAGES = [f"moe_int8{folder}" for folder in ("", ".models", ".parallel", ".serving", ".evals")]
MOST_DIFFERENCES = 3  # named in one line


@dataclass(frozen=True)
class Launch:
    """How torchrun is to start one node, by the names of its options.

    Attributes:
        timeout: seconds for which a node waits for the others.

    Raises:
        ValueError: a number is out of range.
    """

    nnodes: int
    node_rank: int
    nproc_per_node: int
    master_addr: str
    master_port: int
    timeout: float

    def __post_init__(self) -> None:
        for name, most in (("nnodes", 1024), ("nproc_per_node", 1024), ("master_port", 65535), ("timeout", 86400)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} must be from 1 to {most}, got {value:g}")

    def torchrun(self, command: Sequence[str]) -> list[str]:
        """The command line that starts a script, with its arguments, on this node."""
        options = {
            "--nnodes": self.nnodes,
            "--node-rank": self.node_rank,
            "--nproc-per-node": self.nproc_per_node,
            "--master-addr": self.master_addr,
            "--master-port": self.master_port,
            "--rdzv-conf": f"timeout={round(self.timeout)}",
        }
        words = [str(word) for option in options.items() for word in option]
        return [sys.executable, "-m", "torch.distributed.run", *words, *command]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'FAILED':6}  {self.name}: {self.text}"


class Report:
    """The checks made so far; each is told to `say` as it is made."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.checks: list[Check] = []
        self.say = say

    def __call__(self, name: str, find: Callable[[], T]) -> T | None:
        """What `find` found; None if it raised, which is a failed check."""
        try:
            found = find()
        except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a driver that torch cannot use
            self._add(Check(name, False, " ".join(str(error).split())))
            return None
        self._add(Check(name, True, str(found)))
        return found

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [check.name for check in self.checks if not check.ok]

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        self.say(str(check))


@dataclass(frozen=True)
class Shared:
    """What must be the same on all nodes.

    Attributes:
        name: of the check.
        values: what is compared, by name.
        summary: what to say of it if it is the same.
        advice: what to do if it is not.
    """

    name: str
    values: dict[str, str]
    summary: str
    advice: str

    def compare(self, everyone: Mapping[int, Mapping[str, str]]) -> str:
        """`summary`, if all nodes have the same values.

        Args:
            everyone: the values by node rank, this node's own among them.

        Raises:
            ValueError: names what differs, the nodes, and both values.
        """
        reference = min(everyone)
        expected = everyone[reference]
        differing = [
            f"{name} is {expected.get(name, 'missing')} on node {reference}, {got.get(name, 'missing')} on node {node}"
            for node, got in sorted(everyone.items())
            for name in dict.fromkeys((*expected, *got))
            if expected.get(name) != got.get(name)
        ]
        if not differing:
            return self.summary
        more = len(differing) - MOST_DIFFERENCES
        listed = "; ".join(differing[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{listed}: {self.advice}")


def find_node_rank(launch: Launch) -> str:
    """Whether there is such a node; whether another has taken its rank shows when they meet."""
    if not 0 <= launch.node_rank < launch.nnodes:
        raise ValueError(
            f"--node-rank {launch.node_rank} is none of the {launch.nnodes} nodes: they are numbered from 0 to "
            f"{launch.nnodes - 1}, and node 0 is the one with the master address"
        )
    return f"{launch.node_rank} of {launch.nnodes}"


def find_master(launch: Launch) -> str:
    """The master address as a number, if every node can use it and node 0 has it."""
    given = launch.master_addr
    try:
        address = str(socket.getaddrinfo(given, launch.master_port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(
            f"--master-addr {given} does not resolve ({error.strerror}): give the IP address of node 0"
        ) from None
    own = ", ".join(str(interface) for interface in interfaces() if interface.reaches_others) or "only its loopback"
    meaning = ipaddress.ip_address(address.partition("%")[0])
    if launch.nnodes > 1 and (meaning.is_loopback or meaning.is_unspecified):
        also = "" if given == address else f" ({address} on this node)"
        raise ValueError(
            f"--master-addr {given}{also} is another machine on every node: give the address by which the other nodes "
            f"reach node 0; this node has {own}"
        )
    if launch.node_rank == 0 and not is_own(address):
        raise ValueError(
            f"{address} is no address of this node, which has {own}: node 0 is the one with the master address, so "
            "give this node another --node-rank, or every node another --master-addr"
        )
    return address


def find_gpus(count: int) -> str:
    """Whether this node has a GPU for each of its `count` ranks."""
    found = torch.cuda.device_count()
    if found == 0:
        raise ValueError("no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or give --device cpu")
    if found < count:
        raise ValueError(
            f"--nproc-per-node {count} takes a GPU for each rank and {found} are visible: lower it on every node, or "
            "see CUDA_VISIBLE_DEVICES"
        )
    return f"{found} x {torch.cuda.get_device_name(0)}"


def shared_settings(launch: Launch, device: str) -> Shared:
    """What the command lines must have in common."""
    values = {
        "--nnodes": str(launch.nnodes),
        "--nproc-per-node": str(launch.nproc_per_node),
        "--device": device,
    }
    summary = f"{launch.nnodes * launch.nproc_per_node} ranks, {launch.nproc_per_node} on each node, on {device}"
    return Shared("settings", values, summary, "give every node the same")


def shared_versions() -> Shared:
    """The installed versions that must be the same, and a hash of this project's code, which a version alone is not."""
    values = {"python": platform.python_version()} | packages() | {"moe-int8 code": _code_hash()}
    if torch.cuda.is_available():
        values["CUDA"] = str(torch.version.cuda)
        values["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = Path("/sys/module/nvidia/version")
        if driver.exists():
            values["driver"] = driver.read_text().strip()
    summary = ", ".join(f"{name} {value}" for name, value in values.items())
    return Shared("versions", values, summary, "install the same on every node")


def compare_nodes(report: Report, nodes: Nodes, shared: Sequence[Shared], interface: Interface | None) -> None:
    """Compare this node with the others, try the connections, and hear whether they have passed; closes `nodes`.

    Args:
        shared: what this node knows; what another could not find out, and failed for, is not compared with it.
        interface: None if an earlier check found none.
    """
    with closing(nodes), closing(Doorbell(interface, nodes.size)) if interface else nullcontext() as doorbell:
        own = {"shared": {one.name: one.values for one in shared}, "doorbell": doorbell.address if doorbell else None}
        several = nodes.size > 1
        everyone = report("nodes", lambda: Everyone(nodes.exchange(own))) if several else Everyone([own])
        if not everyone:
            return
        for one in shared:
            report(one.name, partial(one.compare, everyone.values(one.name)))
        if doorbell:
            report("connections", lambda: ring([sent["doorbell"] for sent in everyone.sent], nodes.rank))
        if several:
            report("other nodes", lambda: hear(nodes, report.failed))


@dataclass(frozen=True)
class Everyone:
    """What the nodes have sent, by node rank."""

    sent: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"all {len(self.sent)} are here"

    def values(self, name: str) -> dict[int, dict[str, str]]:
        """`Shared.values` of the nodes that know them."""
        return {node: sent["shared"][name] for node, sent in enumerate(self.sent) if name in sent["shared"]}


def hear(nodes: Nodes, failed: list[str]) -> str:
    """Tell the others which checks failed here; ValueError names the nodes where some did."""
    problems = [
        f"node {node} failed ({', '.join(names)})"
        for node, names in enumerate(nodes.exchange(failed))
        if names and node != nodes.rank
    ]
    if problems:
        raise ValueError(f"{', '.join(problems)}: see its screen")
    return "passed"


def _code_hash() -> str:
    """Of the Python files of this project, wherever they are installed."""
    specs = [spec for package in PACKAGES if (spec := find_spec(package))]
    folders = {folder for spec in specs for folder in spec.submodule_search_locations or []}
    digests = {
        hashlib.sha256(file.read_bytes()).hexdigest() for folder in folders for file in Path(folder).rglob("*.py")
    }
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:8]
