"""The meeting of the nodes: each failure names the node and says what to check. Nodes are threads of this process."""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from moe_int8.parallel.nodes import Nodes, NodesError

HOST = "127.0.0.1"
LONG = 20.0  # seconds that no test needs
SHORT = 0.5  # seconds that every test can spare


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def node(rank: int, size: int, port: int, timeout: float = LONG, values: tuple[Any, ...] = ("first", "second")) -> Any:
    """What a node gets in its exchanges, or the message with which it ends."""
    try:
        with closing(Nodes(rank, size, HOST, port, timeout)) as nodes:
            return [nodes.exchange([rank, value]) for value in values]
    except NodesError as error:
        return str(error)


def together(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        running: list[Future[Any]] = [pool.submit(work) for work in works]
        return [one.result(timeout=2 * LONG) for one in running]


def test_every_node_gets_every_value_in_order_whoever_comes_first(port):
    def late() -> Any:
        time.sleep(0.3)
        return node(0, 3, port)

    expected = [[[rank, value] for rank in range(3)] for value in ("first", "second")]
    assert together(lambda: node(2, 3, port), lambda: node(1, 3, port), late) == [expected] * 3


def test_a_node_alone_gets_its_own_value(port):
    assert node(0, 1, port) == [[[0, "first"]], [[0, "second"]]]


def test_a_node_returns_when_node_0_has_freed_the_port(port):
    """torchrun's store listens there next; a torchrun that is faster than node 0 must not reach the old listener."""

    def slow_node_0() -> None:
        nodes = Nodes(0, 2, HOST, port, LONG)
        nodes.exchange("only")
        time.sleep(0.3)
        nodes.close()

    def other() -> None:
        node(1, 2, port, values=("only",))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=1)

    together(slow_node_0, other)
    socket.create_server(("", port)).close()


def test_c60_missing_nodes_are_named_to_those_that_came(port):
    began = time.monotonic()
    messages = together(lambda: node(0, 4, port, SHORT), lambda: node(2, 4, port, SHORT))
    assert time.monotonic() - began < SHORT + 2  # the timeout, not a multiple of it
    for message in messages:
        assert message.startswith(f"node 1 and node 3 did not come to {HOST}:{port} within 0.5 s")
        assert "--nnodes 4" in message
        assert "--master-port" in message


def test_c60_node_0_missing_while_its_machine_is_up(port):
    message = node(1, 2, port, SHORT)
    assert message.startswith(f"node 0 does not answer at {HOST}:{port} within 0.5 s, though its machine does")
    assert "--node-rank 0" in message


def test_c60_nothing_answers_at_the_master_address(port, monkeypatch):
    def dropped(*_: Any, **__: Any) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", dropped)
    message = node(1, 2, port, SHORT)
    assert "(timed out): check --master-addr" in message
    assert "firewall" in message


def test_a_taken_port_is_said_at_once(port):
    with socket.create_server((HOST, port)):
        message = node(0, 2, port)
    assert message.startswith(f"port {port} cannot be used on this node (Address already in use")
    assert "another --master-port" in message


def test_a_node_rank_given_twice_is_told_to_the_second_and_to_all_if_a_node_is_missing(port):
    def second() -> Any:
        time.sleep(0.4)  # the other one is there by then
        return node(1, 3, port, SHORT)

    host, first, twice = together(lambda: node(0, 3, port, 1.5), lambda: node(1, 3, port, LONG), second)
    assert twice == f"--node-rank 1 was given twice, at {HOST} and at {HOST}: give every node its own"
    for message in (host, first):
        assert message.startswith("node 2 did not come")
        assert message.endswith(twice)


def test_a_node_rank_that_node_0_does_not_know(port):
    host, other = together(lambda: node(0, 2, port, SHORT), lambda: node(3, 4, port))
    assert other == "node 0 was started with --nnodes 2, which leaves no --node-rank 3"
    assert host.endswith(other)


def test_an_interrupted_node_may_come_again(port):
    def interrupted_then_back() -> Any:
        Nodes(1, 3, HOST, port, LONG)._peers[0].close()
        return node(1, 3, port)

    def late() -> Any:
        time.sleep(0.5)
        return node(2, 3, port)

    results = together(lambda: node(0, 3, port), interrupted_then_back, late)
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 2


def test_strangers_on_the_port_are_ignored(port):
    def stranger() -> None:
        time.sleep(0.2)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\n", b'{"node": "x"}\n', b"[]\n", b"\xff\n", b""):
            with socket.create_connection((HOST, port)) as connection:
                connection.sendall(words)
        return node(1, 2, port)

    first, second = together(lambda: node(0, 2, port), stranger)
    assert first == second == [[[0, "first"], [1, "first"]], [[0, "second"], [1, "second"]]]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_node_that_leaves_is_named(port, leaver):
    first, second = together(
        lambda: node(0, 2, port, 1, values=("first",) if leaver == 0 else ("first", "second")),
        lambda: node(1, 2, port, 1, values=("first",) if leaver == 1 else ("first", "second")),
    )
    message = second if leaver == 0 else first
    assert message.startswith(f"node {leaver}")
    assert "see its screen" in message
    assert "has left" in message


def test_another_program_that_holds_the_port_is_no_node_0(port):
    def babble() -> None:
        with socket.create_server((HOST, port)) as server:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(json.dumps("hello").encode() + b"\n")

    thread = threading.Thread(target=babble)
    thread.start()
    message = node(1, 2, port)
    thread.join()
    assert message.startswith(f"node 0 at {HOST}:{port} has left")
