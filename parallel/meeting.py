"""How the ranks of one torchrun meet before any of them loads: who is there, and do all want the same?

`meet` comes first, so that whatever fails afterwards is told to all (see watch.py). `agree` ends the preparations:
either every rank is ready and all have the same settings, or all of them end here and know why.
"""

import hashlib
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moe_int8.parallel.watch import Watch

JOIN_TIMEOUT = 60.0  # seconds
POLL = 0.05  # seconds between two looks at the store
RANK_DIGITS = 8
SHOWN = 60  # characters of a setting that a message shows


class MeetingError(Exception):
    """The ranks have not met or do not agree. Every rank raises it at the same point, so that nobody need be told."""


@dataclass
class Meeting:
    """The ranks that have met.

    Attributes:
        rank: of this process.
        hosts: name of each rank's node.
        store: keys and values that all see.
        watch: ends this process when another rank has failed.
        join_timeout: seconds that the ranks may take to come, and then to connect.
        agreed: all ranks are ready and have the same settings.
        waits: calls of `wait_for_first` so far.
    """

    rank: int
    hosts: list[str]
    store: dist.Store
    watch: Watch
    join_timeout: float
    agreed: bool = False
    waits: int = 0


_meeting: Meeting | None = None  # one in a process, as torch has one default group


def current_meeting() -> Meeting | None:
    """The meeting that this process has joined, and perhaps left."""
    return _meeting


def world_size() -> int:
    """How many ranks this torchrun has; 1 without it. Known before they have met."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def meet(join_timeout: float = JOIN_TIMEOUT) -> None:
    """Wait until all ranks of this torchrun are there; nothing to do alone, or once they have met.

    Args:
        join_timeout: seconds that they may take.

    Raises:
        MeetingError: the master address cannot work, or ranks are missing; says which and what to check.
    """
    global _meeting
    if world_size() == 1 or _meeting is not None:
        return
    unset = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if unset:
        raise MeetingError(f"WORLD_SIZE is set and {unset[0]} is not: start the script with torchrun, or unset both")
    address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    _check_master(address)
    deadline = time.monotonic() + join_timeout
    try:
        store = _open_store(address, port, rank, deadline)
        keys = [f"host/{index}" for index in range(world_size())]
        listener = _listen() if rank == 0 else None
        if listener:
            store.set("watch", json.dumps([listener.getsockname()[1], secrets.token_hex(8)]))
        store.set(keys[rank], socket.gethostname())
        missing = _wait_for(store, keys, deadline)
        if missing:
            raise MeetingError(
                f"{_ranks(missing)} of {world_size()} did not come to {address}:{port} within {join_timeout:g} s; "
                f"{_what_to_check()}"
            )
        hosts = [store.get(key).decode() for key in keys]
        watch_port, word = json.loads(store.get("watch"))
        if listener:
            connections = _accept(listener, word, deadline)
        else:
            connections = _connect(address, watch_port, word, rank, deadline)
    except (dist.DistError, OSError) as error:
        raise MeetingError(
            f"rank {rank} of {world_size()} did not meet the others at {address}:{port} within {join_timeout:g} s "
            f"({first_line(error)}); {_what_to_check()}"
        ) from error
    names = [_who([index], hosts) for index in range(len(hosts))]
    _meeting = Meeting(rank, hosts, store, Watch(rank, names, connections), join_timeout)


def agree(settings: Mapping[str, object], timeout: float) -> None:
    """Wait until every rank is ready, and compare their settings.

    Args:
        settings: whatever must be the same on all ranks, by the name that a user knows it by.
        timeout: seconds that the slowest rank may take.

    Raises:
        MeetingError: another rank has failed (repeats its message), or a setting differs (names it, with all values).
    """
    assert _meeting is not None, "the ranks have not met"
    outcomes = exchange({"settings": {name: _short(str(value)) for name, value in settings.items()}}, timeout)
    failures = _by_value([outcome.get("error", "") for outcome in outcomes], _meeting.hosts)
    if failures.keys() != {""}:
        raise MeetingError("; ".join(f"{who} failed: {what}" for what, who in failures.items() if what))
    differences = []
    for name in {name: None for outcome in outcomes for name in outcome["settings"]}:
        values = _by_value([outcome["settings"].get(name, "not known") for outcome in outcomes], _meeting.hosts)
        if len(values) > 1:
            differences.append(f"{name} differs: " + ", ".join(f"{who}: {value}" for value, who in values.items()))
    if differences:
        raise MeetingError("; ".join(differences) + ". Start every node with the same command, files and versions")
    _meeting.agreed = True


def exchange(outcome: Mapping[str, object], timeout: float) -> list[dict[str, Any]]:
    """What every rank brings to the end of the preparations, in rank order. Called once, by all.

    Raises:
        MeetingError: some have not come to this point within `timeout` seconds; names them.
    """
    assert _meeting is not None, "the ranks have not met"
    keys = [f"outcome/{index}" for index in range(len(_meeting.hosts))]
    try:
        _meeting.store.set(keys[_meeting.rank], json.dumps(outcome))
        missing = _wait_for(_meeting.store, keys, time.monotonic() + timeout)
        if not missing:
            return [json.loads(_meeting.store.get(key)) for key in keys]
    except dist.DistError as error:
        raise MeetingError(f"the store of {_who([0], _meeting.hosts)} is gone: {first_line(error)}") from error
    raise MeetingError(f"{_who(missing, _meeting.hosts)} did not get ready to load within {timeout:g} s")


def wait_for_first() -> None:
    """Wait until rank 0 comes here too, however long that takes; a collective would give up."""
    if _meeting is None:
        return
    key = f"first/{_meeting.waits}"
    _meeting.waits += 1
    if _meeting.rank == 0:
        _meeting.store.set(key, "")
    else:
        _wait_for(_meeting.store, [key], float("inf"))


def part(timeout: float) -> None:
    """Leave the meeting together with all other ranks, if there are any.

    Raises:
        TimeoutError: some have not come here within `timeout` seconds.
    """
    if _meeting is not None:
        _meeting.watch.close(timeout)


def interface_hint() -> str:
    """What to check when ranks do not connect."""
    gloo, nccl = (
        f"{name} ({os.environ.get(name, 'not set')})" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    )
    return f"check that {gloo} on CPUs, {nccl} on GPUs, names the network interface to the other nodes"


def _what_to_check() -> str:
    """For whoever waits for ranks that do not come."""
    return (
        "check that every node runs the same command with its own --node-rank, that --master-addr is an address of "
        f"node 0 which the others reach, and {interface_hint().removeprefix('check ')}"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text; torch appends its own stack in others."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_master(address: str) -> None:
    """Refuse a master address that every node takes for itself."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", world_size() // ranks_here))
    try:
        loopback = address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name; on node 0 it may well mean a loopback address
        loopback = False
    if loopback and nodes > 1:
        raise MeetingError(
            f"the master address {address} is each of the {nodes} nodes itself; give all of them --master-addr with "
            "an address of node 0 that the others reach"
        )


def _open_store(address: str, port: int, rank: int, deadline: float) -> dist.Store:
    """The keys and values of this run: torchrun's own, or else rank 0's."""
    host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not host:  # torch fills a screen when it cannot connect, so try it first
        _dial(address, port, deadline).close()
    remaining = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    store = dist.TCPStore(address, port, is_master=host, timeout=remaining, wait_for_workers=False)
    return dist.PrefixStore(f"moe_int8/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait_for(store: dist.Store, keys: Sequence[str], deadline: float) -> list[int]:
    """Wait until all keys are there; returns the places of those that are not."""
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return [index for index, key in enumerate(keys) if not store.check([key])]
        time.sleep(POLL)
    return []


def _listen() -> socket.socket:
    """Where the other ranks' watches reach rank 0."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=world_size())


def _accept(listener: socket.socket, word: str, deadline: float) -> dict[int, socket.socket]:
    """Rank 0: a connection from every other rank. Whoever does not know the word is a stranger, say a port scanner."""
    connections: dict[int, socket.socket] = {}
    with listener:
        while len(connections) < world_size() - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            connection, _ = listener.accept()
            connection.settimeout(1.0)
            try:
                said, rank = connection.recv(len(word) + RANK_DIGITS, socket.MSG_WAITALL).decode().split()
                known = said == word
            except (OSError, ValueError):
                known = False
            if known:
                connections[int(rank)] = connection
            else:
                connection.close()
    return connections


def _connect(address: str, port: int, word: str, rank: int, deadline: float) -> dict[int, socket.socket]:
    """The other ranks: a connection to rank 0."""
    connection = _dial(address, port, deadline)
    connection.sendall(f"{word}{rank:{RANK_DIGITS}}".encode())
    return {0: connection}


def _dial(address: str, port: int, deadline: float) -> socket.socket:
    """Connect, as soon as somebody listens there."""
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.01))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL)


def _by_value(values: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
    """Which ranks have each value, in words."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return {value: _who(having, hosts) for value, having in ranks.items()}


def _who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """As in "rank 1 (a)" or "ranks 8-15 (b)"."""
    return f"{_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"


def _ranks(ranks: Sequence[int]) -> str:
    """As in "rank 1" or "ranks 0-7, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _short(value: str) -> str:
    """A setting as it is compared and shown; a long one with a hash of the whole."""
    if len(value) <= SHOWN:
        return value
    return f"{value[:SHOWN]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:12]})"
