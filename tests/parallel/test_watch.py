"""The watch among several ranks, here as threads of one process over socket pairs, with short limits."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from moe_int8.parallel import watch
from moe_int8.parallel.watch import Watch

LIMIT = 1.0  # seconds of silence; the machine may be busy
NAMES = ["rank 0 (a)", "rank 1 (a)", "rank 2 (b)"]


@pytest.fixture
def ended(monkeypatch) -> list[int]:
    """The statuses with which watches have ended this process, which lives on."""
    statuses: list[int] = []
    monkeypatch.setattr(watch.os, "_exit", statuses.append)
    return statuses


def pairs() -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Rank 0's connections, and the other ranks' ends of them."""
    both = {rank: socket.socketpair() for rank in (1, 2)}
    return {rank: pair[0] for rank, pair in both.items()}, {rank: pair[1] for rank, pair in both.items()}


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    at_zero, others = pairs()
    made = [Watch(0, NAMES, at_zero, LIMIT), *(Watch(rank, NAMES, {0: others[rank]}, LIMIT) for rank in (1, 2))]
    yield made
    for each in made:
        assert not alive(each), "a thread is left"


def alive(each: Watch) -> bool:
    each._thread.join(5)
    return each._thread.is_alive()


def close_all(watches: list[Watch], delays: list[float]) -> list[float]:
    """Close each watch after its delay; returns the seconds after which each had closed."""
    start = time.monotonic()
    closed = [0.0] * len(watches)

    def close(index: int) -> None:
        time.sleep(delays[index])
        watches[index].close(timeout=5)
        closed[index] = time.monotonic() - start

    threads = [threading.Thread(target=close, args=(index,)) for index in range(len(watches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return closed


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_c56_what_one_rank_says_is_printed_by_all_others(failing, watches, ended, capfd):
    start = time.monotonic()
    watches[failing].tell("no such file")
    assert not any(alive(each) for each in watches)
    said = f"{NAMES[failing]} failed: no such file"
    lines = capfd.readouterr().err
    assert sorted(lines.split("error ")[1:]) == [f"[rank {rank}]: {said}\n" for rank in range(3) if rank != failing]
    assert ended == [1, 1]  # the failing rank ends by itself
    assert time.monotonic() - start < watch.FAREWELL  # nobody had to wait for a time limit


def test_c56_a_closed_connection_is_a_rank_that_was_killed(ended, capfd):
    at_zero, others = pairs()
    made = [Watch(0, NAMES, at_zero, LIMIT), Watch(2, NAMES, {0: others[2]}, LIMIT)]
    others[1].close()
    assert not any(alive(each) for each in made)
    lines = capfd.readouterr().err.splitlines()
    assert [line[:60] for line in sorted(lines)] == [
        f"error [rank {rank}]: rank 1 (a) ended without a word: it was killed"[:60] for rank in (0, 2)
    ]
    assert ended == [1, 1]


def test_c56_a_silent_rank_hangs(ended, capfd):
    at_zero, others = pairs()
    start = time.monotonic()
    made = [Watch(0, NAMES, at_zero, LIMIT), Watch(2, NAMES, {0: others[2]}, LIMIT)]
    assert not any(alive(each) for each in made)
    assert time.monotonic() - start > LIMIT
    lines = sorted(capfd.readouterr().err.splitlines())
    assert lines == [f"error [rank {rank}]: no answer for 1 s from rank 1 (a): hangs, or is cut off" for rank in (0, 2)]
    assert ended == [1, 1]
    others[1].close()


def test_ranks_that_fall_silent_together_are_all_named(ended, capfd):
    at_zero, others = pairs()
    assert not alive(Watch(0, NAMES, at_zero, LIMIT))
    assert "from rank 1 (a), rank 2 (b): hangs" in capfd.readouterr().err
    for connection in others.values():
        connection.close()


def test_a_silent_rank_0_is_noticed_by_the_others(ended, capfd):
    at_zero, others = pairs()
    made = [Watch(rank, NAMES, {0: others[rank]}, LIMIT) for rank in (1, 2)]
    assert not any(alive(each) for each in made)
    assert capfd.readouterr().err.count("no answer for 1 s from rank 0 (a): hangs") == 2
    for connection in at_zero.values():
        connection.close()


@pytest.mark.parametrize("delays", [[0, 0, 0], [0, 0.2, 2 * LIMIT], [2 * LIMIT, 0, 0.2]], ids=str)
def test_ranks_that_finish_one_after_another_leave_together(delays, watches, ended, capfd):
    closed = close_all(watches, delays)
    assert min(closed) >= max(delays)
    assert max(closed) < max(delays) + 2  # at once, not when a time limit ends
    watches[0].close(timeout=1)  # again: nothing happens
    assert capfd.readouterr().err == ""
    assert ended == []


def test_a_rank_that_is_killed_while_others_have_finished_is_named(ended, capfd):
    at_zero, others = pairs()
    zero, two = Watch(0, NAMES, at_zero, LIMIT), Watch(2, NAMES, {0: others[2]}, LIMIT)
    closing = threading.Thread(target=two.close, args=(5,))
    closing.start()
    time.sleep(0.1)
    others[1].close()
    closing.join(5)
    assert not alive(zero)
    assert not alive(two)
    assert capfd.readouterr().err.count("rank 1 (a) ended without a word") == 2


def test_a_rank_that_does_not_finish_is_named(watches, ended):
    with pytest.raises(TimeoutError, match=r"rank 1 \(a\), rank 2 \(b\) has not finished 0.1 s after rank 0"):
        watches[0].close(timeout=0.1)
    with pytest.raises(TimeoutError, match=r"not all ranks have finished 0.1 s after this one"):
        watches[1].close(timeout=0.1)
    close_all(watches, [0, 0, 0])


@pytest.mark.parametrize("work", ["native", "python"])
def test_a_busy_main_thread_is_no_hang(work, watches, ended, capfd):
    end = time.monotonic() + 2 * LIMIT
    a = torch.randn(2500, 2500)
    while time.monotonic() < end:
        if work == "native":
            a @ a  # takes about as long as the limit
    close_all(watches, [0, 0, 0])
    assert capfd.readouterr().err == ""
    assert ended == []


def test_ranks_that_stood_still_together_do_not_accuse_each_other():
    """A node, a container or a virtual machine that is paused and goes on."""
    pair = socket.socketpair()
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            pair[1 - rank].close()
            made = Watch(rank, NAMES[:2], {1 - rank: pair[rank]}, LIMIT)
            time.sleep(2)  # stopped in it
            made.close(timeout=5)
            os._exit(0)
        children.append(child)
    for connection in pair:
        connection.close()
    time.sleep(0.3)
    for child in children:
        os.kill(child, signal.SIGSTOP)
    time.sleep(2 * LIMIT)
    for child in children:
        os.kill(child, signal.SIGCONT)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
