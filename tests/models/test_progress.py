import io
import sys

import pytest

from moe_int8.models.deepseek.progress import progress_bar


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    return clock


def work(clock: Clock, seconds: int) -> None:
    with progress_bar(total=seconds, desc="load", unit="B", leave=False) as bar:
        for _ in range(seconds):
            clock.now += 1
            bar.update(1)


def test_a_log_file_gets_few_whole_lines(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    work(clock, seconds=100)
    lines = [line for line in sys.stderr.getvalue().replace("\r", "").split("\n") if line.strip()]
    assert 3 <= len(lines) <= 5
    assert lines[-1].startswith("load: 100%, 100 of 100,  1.00B/s, 01:40<")


def test_a_log_file_gets_nothing_of_what_is_soon_done(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    work(clock, seconds=20)
    assert sys.stderr.getvalue() == ""


def test_a_terminal_gets_a_bar_at_once(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    work(clock, seconds=3)
    assert "load:   0%|" in sys.stderr.getvalue()
    assert "\n" not in sys.stderr.getvalue()  # one line, written over and over
