"""How ranks meet and compare their settings; tests/parallel/test_failures.py has whole runs."""

import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from moe_int8.parallel import meeting
from moe_int8.parallel.meeting import MeetingError, agree, meet, wait_for_first

HOSTS = ["a", "a", "b", "b"]


@pytest.fixture
def torchrun(monkeypatch) -> int:
    """The environment of rank 0 of two; returns the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return port


@pytest.fixture
def four(monkeypatch):
    """agree() for four ranks of two nodes, whose outcomes a test gives; it is rank 0 that asks."""
    met = SimpleNamespace(hosts=HOSTS, agreed=False)
    monkeypatch.setattr(meeting, "_meeting", met)

    def ask(*outcomes: dict) -> SimpleNamespace:
        monkeypatch.setattr(meeting, "exchange", lambda outcome, timeout: list(outcomes))
        agree({}, timeout=1)
        return met

    return ask


def settings(**values: str) -> dict:
    return {"settings": values}


def test_equal_settings_are_agreed_upon(four):
    assert four(*[settings(dtype="int8")] * 4).agreed


def test_c57_a_difference_is_named_with_all_values_and_who_has_them(four):
    with pytest.raises(MeetingError, match=r"^dtype differs: rank 0 \(a\): int8, ranks 1-3 \(a, b\): bf16\. Start"):
        four(settings(dtype="int8"), *[settings(dtype="bf16")] * 3)
    with pytest.raises(MeetingError, match=r"^x differs: ranks 0, 2 \(a, b\): 1, ranks 1, 3 \(a, b\): 2; y differs: "):
        four(*[settings(x=str(1 + rank % 2), y=str(rank)) for rank in range(4)])


def test_c57_a_setting_that_only_some_know_differs(four):
    with pytest.raises(MeetingError, match=r"y differs: ranks 0-2 \(a, b\): not known, rank 3 \(b\): 1"):
        four(*[settings(x="1")] * 3, settings(x="1", y="1"))


def test_c56_a_rank_that_failed_counts_more_than_a_difference(four):
    with pytest.raises(MeetingError, match=r"^ranks 2-3 \(b\) failed: no such folder$"):
        four(settings(x="1"), settings(x="2"), *[{"error": "no such folder"}] * 2)


def test_c57_long_settings_differ_beyond_what_is_shown():
    prompts = [str(["a" * 100 + end]) for end in "xy"]
    short = [meeting._short(prompt) for prompt in prompts]
    assert short[0] != short[1]
    assert all(len(each) < 100 for each in short)
    assert meeting._short("abc") == "abc"


def test_alone_there_is_nobody_to_meet(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    meet()
    wait_for_first()
    assert meeting.current_meeting() is None


def test_half_an_environment_is_refused(torchrun, monkeypatch):
    monkeypatch.delenv("RANK")
    with pytest.raises(MeetingError, match="WORLD_SIZE is set and RANK is not: start the script with torchrun"):
        meet()


def test_c60_a_taken_port_is_said(torchrun):
    taken = dist.TCPStore("127.0.0.1", torchrun, is_master=True, wait_for_workers=False)
    with pytest.raises(MeetingError, match=f"did not meet the others at 127.0.0.1:{torchrun} .*EADDRINUSE"):
        meet(join_timeout=2)
    del taken


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1"])
def test_c60_a_loopback_master_is_for_one_node(address, torchrun, monkeypatch):
    meeting._check_master(address)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(MeetingError, match=f"the master address {address} is each of the 2 nodes itself"):
        meeting._check_master(address)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    meeting._check_master(address)


def test_other_masters_are_for_any_number_of_nodes(torchrun, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for address in ("10.0.0.1", "node-a", "fd00::1"):
        meeting._check_master(address)


def test_rank_0_listens_to_its_own_ranks_only(torchrun):
    word, deadline = "0123456789abcdef", time.monotonic() + 10
    listener = meeting._listen()
    port = listener.getsockname()[1]
    accepted: list[dict[int, socket.socket]] = []
    thread = threading.Thread(target=lambda: accepted.append(meeting._accept(listener, word, deadline)))
    thread.start()
    for said in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", f"{'f' * 16}       1".encode(), b"\xff" * 24, b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
    (mine,) = meeting._connect("127.0.0.1", port, word, 1, deadline).values()
    thread.join(10)
    (connections,) = accepted
    assert list(connections) == [1]
    connections[1].sendall(b"hello")
    assert mine.recv(5) == b"hello"
    for connection in (mine, connections[1]):
        connection.close()


def test_a_restarted_run_does_not_read_what_the_last_one_wrote(torchrun, monkeypatch):
    deadline = time.monotonic() + 10
    first = meeting._open_store("127.0.0.1", torchrun, 0, deadline)
    first.set("watch", "old")
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RESTART_COUNT", "1")
    second = meeting._open_store("127.0.0.1", torchrun, 1, deadline)
    assert first.check(["watch"])
    assert not second.check(["watch"])
