"""What preflight says of a node before torchrun starts, check by check."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moe_int8.parallel.network import Interface
from moe_int8.parallel.nodes import Nodes
from moe_int8.parallel.preflight import (
    Launch,
    Report,
    Shared,
    compare_nodes,
    find_gpus,
    find_master,
    find_node_rank,
    shared_settings,
    shared_versions,
)

NOBODYS = "203.0.113.7"  # an address reserved for documentation
LO = Interface("lo", "127.0.0.1")


def launch(**changes: Any) -> Launch:
    settings = {
        "nnodes": 2,
        "node_rank": 0,
        "nproc_per_node": 8,
        "master_addr": NOBODYS,
        "master_port": 29500,
        "timeout": 60.0,
    }
    return Launch(**(settings | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"nnodes": 0}, "--nnodes must be from 1 to 1024, got 0"),
        ({"nproc_per_node": -1}, "--nproc-per-node must be from 1 to 1024, got -1"),
        ({"master_port": 70000}, "--master-port must be from 1 to 65535, got 70000"),
        ({"timeout": float("nan")}, "--timeout must be from 1 to 86400, got nan"),
    ],
)
def test_numbers_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        launch(**changes)


def test_the_command_line_is_torchruns_with_a_short_rendezvous():
    command = launch(node_rank=1, timeout=45.0).torchrun(["scripts/generate.py", "--chat"])
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert " ".join(command[3:]) == (
        "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 203.0.113.7 --master-port 29500 "
        "--rdzv-conf timeout=45 scripts/generate.py --chat"
    )


@pytest.mark.parametrize("rank", [-1, 2])
def test_c60_a_node_rank_out_of_range(rank):
    message = f"--node-rank {rank} is none of the 2 nodes: they are numbered from 0 to 1, and node 0 is the one with"
    with pytest.raises(ValueError, match=message):
        find_node_rank(launch(node_rank=rank))
    assert find_node_rank(launch(node_rank=1)) == "1 of 2"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "address, shown",
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1"),
        ("localhost", r"localhost \((127.0.0.1|::1) on this node\)"),
        ("::1", "::1"),
        ("0.0.0.0", "0.0.0.0"),
    ],
)
def test_c60_a_loopback_master_with_several_nodes_is_refused(address, shown, rank):
    expected = f"--master-addr {shown} is another machine on every node: give the address by which the other nodes"
    with pytest.raises(ValueError, match=expected):
        find_master(launch(master_addr=address, node_rank=rank))


def test_a_loopback_master_is_right_for_one_node():
    assert find_master(launch(master_addr="127.0.0.1", nnodes=1)) == "127.0.0.1"


def test_c60_a_master_address_that_node_0_does_not_have():
    with pytest.raises(ValueError, match=f"{NOBODYS} is no address of this node, which has .*another --node-rank"):
        find_master(launch())
    assert find_master(launch(node_rank=1)) == NOBODYS  # the others need not have it


def test_c60_a_master_name_that_does_not_resolve(monkeypatch):
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"--master-addr nod0 does not resolve \(Name or service not known\): give"):
        find_master(launch(master_addr="nod0"))


@pytest.mark.parametrize(
    "visible, message", [(0, "no GPU is visible: see nvidia-smi"), (4, "--nproc-per-node 8 takes .* and 4 are visible")]
)
def test_fewer_gpus_than_ranks(visible, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    with pytest.raises(ValueError, match=message):
        find_gpus(8)


def test_the_report_has_a_line_for_each_check_and_the_names_of_those_that_failed():
    lines: list[str] = []
    report = Report(lines.append)

    def fail() -> None:
        raise ValueError("two\n  lines")

    def break_down() -> None:
        raise FileNotFoundError(2, "No such file", "x")

    def no_driver() -> None:
        raise RuntimeError("CUDA unknown error")

    assert report("one", lambda: 7) == 7
    assert report("two", fail) is None
    assert report("three", break_down) is None
    assert report("four", no_driver) is None
    assert lines == [
        "ok      one: 7",
        "FAILED  two: two lines",
        "FAILED  three: [Errno 2] No such file: 'x'",
        "FAILED  four: CUDA unknown error",
    ]
    assert report.failed == ["two", "three", "four"]


VERSIONS = Shared("versions", {"torch": "2.13.0", "triton": "3.9.0"}, "torch 2.13.0", "install the same on every node")


def test_the_same_versions():
    assert VERSIONS.compare({0: VERSIONS.values, 1: dict(VERSIONS.values)}) == "torch 2.13.0"


def test_other_versions_are_named_with_both_values_and_the_node():
    others = {"torch": "2.11.0", "triton": "3.9.0", "NCCL": "2.27"}
    message = (
        "torch is 2.13.0 on node 0, 2.11.0 on node 2; NCCL is missing on node 0, 2.27 on node 2: "
        "install the same on every node"
    )
    with pytest.raises(ValueError, match=message):
        VERSIONS.compare({0: VERSIONS.values, 1: VERSIONS.values, 2: others})


def test_many_differences_stay_one_short_line():
    files = {f"model-{i}.safetensors": "1 bytes" for i in range(163)}
    with pytest.raises(ValueError, match=r"model-2.safetensors is 1 bytes on node 0, missing on node 1; and 160 more"):
        VERSIONS.compare({0: files, 1: {}})


def test_versions_and_code_are_found():
    values = shared_versions().values
    assert values["torch"] == torch.__version__
    assert values["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(values["moe-int8 code"]) == 8


def run_nodes(*nodes: tuple[list[Shared], list[str], Interface | None]) -> list[list[str]]:
    """The lines of each node, given what it knows, which checks have failed before, and its interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(rank: int) -> list[str]:
        shared, failed, interface = nodes[rank]
        lines: list[str] = []
        report = Report(lines.append)
        for name in failed:
            report(name, lambda: int("not a number"))
        compare_nodes(report, Nodes(rank, len(nodes), "127.0.0.1", port, 20), shared, interface)
        return lines[len(failed) :]

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(work, range(len(nodes))))


def test_nodes_that_fit_together():
    shared = [shared_settings(launch(), "cpu"), VERSIONS]
    expected = [
        "ok      nodes: all 2 are here",
        "ok      settings: 16 ranks, 8 on each node, on cpu",
        "ok      versions: torch 2.13.0",
        "ok      connections: every other node can be reached",
        "ok      other nodes: passed",
    ]
    assert run_nodes((shared, [], LO), (shared, [], LO)) == [expected, expected]


def test_settings_that_differ_fail_on_both_nodes():
    first, second = run_nodes(
        ([shared_settings(launch(), "cuda")], [], None),
        ([shared_settings(launch(nproc_per_node=4), "cuda")], [], None),
    )
    line = "FAILED  settings: --nproc-per-node is 8 on node 0, 4 on node 1: give every node the same"
    assert first[1] == second[1] == line


def test_a_check_that_failed_on_one_node_stops_the_other():
    first, second = run_nodes(([VERSIONS], [], None), ([], ["model", "interface"], None))
    assert first == [
        "ok      nodes: all 2 are here",
        "ok      versions: torch 2.13.0",
        "FAILED  other nodes: node 1 failed (model, interface): see its screen",
    ]
    assert second == ["ok      nodes: all 2 are here", "ok      other nodes: passed"]


def test_one_node_has_nobody_to_meet():
    assert run_nodes(([VERSIONS], [], None)) == [["ok      versions: torch 2.13.0"]]
