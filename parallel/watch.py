"""One rank's failure ends all: each learns which rank failed and why, says so in one line and ends.

Every rank keeps a connection to rank 0, which a thread of its own serves:
  - a rank that fails says why, and rank 0 passes it on;
  - a rank that is killed leaves a closed connection, which is seen at once;
  - a rank that hangs, or whose node is cut off, falls silent: a sign of life should come every few seconds.

Loading, compiling and a long prefill are not taken for a hang: the thread needs Python's lock for some microseconds at
a time, and what takes long gives the lock away meanwhile: torch's operators (with them the reading and copying of
weights), Triton's compiler, NCCL and gloo. What this does not see is a rank whose main thread waits for ever while its
watch is well; the timeout of the collectives ends that.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence

# Seconds of silence that mean a rank hangs. torchrun gives a hanging process 30 s more before it kills it, and all
# ranks shall have ended within 60 s.
SILENCE_LIMIT = 20.0
SIGNS = 10  # signs of life in that time
FAREWELL = 2.0  # seconds in which the others can take in why this rank ends
LONGEST_MESSAGE = 2000  # characters of an error that travel

# A message is a line of JSON: [kind, text].
ALIVE, FAILED, DONE = "alive", "failed", "done"


class Watch:
    """This rank's part of it. When another rank fails it prints a line and ends the process with status 1.

    Args:
        rank: of this process.
        names: what to call each rank in a message.
        connections: on rank 0 a connected socket for every other rank, on the others one for rank 0.
        silence_limit: seconds.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        connections: Mapping[int, socket.socket],
        silence_limit: float = SILENCE_LIMIT,
    ) -> None:
        self._rank = rank
        self._names = names
        self._peers = dict(connections)
        self._silence_limit = silence_limit
        self._sending = threading.Lock()  # held while a message is sent or a connection is closed
        self._selector = selectors.DefaultSelector()
        for peer, connection in self._peers.items():
            connection.settimeout(FAREWELL)  # of a send; one that does not fit into the buffers of a hanging peer
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._done: set[int] = set()  # ranks that have finished
        self._all_done = threading.Event()
        self._ends_at: float | None = None  # once a rank has failed: when the connections are closed at the latest
        self._fatal = False  # another rank has failed
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def tell(self, message: str) -> None:
        """Say that this rank has failed and why; returns when the others know, or after FAREWELL seconds."""
        self._ends_at = time.monotonic() + FAREWELL  # first: from now on nobody's end is news
        self._send(FAILED, f"{self._names[self._rank]} failed: {message[:LONGEST_MESSAGE]}")
        self._thread.join(2 * FAREWELL)

    def close(self, timeout: float) -> None:
        """Finish together: returns when every rank has come here, and watches them until then.

        Raises:
            TimeoutError: a rank has not come within `timeout` seconds; rank 0 names it.
        """
        if self._rank == 0 and not self._all_done.wait(timeout):
            late = ", ".join(self._names[peer] for peer in sorted(self._peers) if peer not in self._done)
            raise TimeoutError(f"{late} has not finished {timeout:g} s after rank 0")
        self._send(DONE)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"not all ranks have finished {timeout:g} s after this one")

    def _run(self) -> None:
        """The thread: lives until every connection is closed."""
        heard = dict.fromkeys(self._peers, time.monotonic())
        unread = dict.fromkeys(self._peers, b"")
        interval = self._silence_limit / SIGNS
        next_sign = time.monotonic()
        while self._peers and (self._ends_at is None or time.monotonic() < self._ends_at):
            start = time.monotonic()
            if start >= next_sign:
                self._send(ALIVE)
                next_sign = start + interval
            ready = [key.data for key, _ in self._selector.select(next_sign - start)]
            now = time.monotonic()
            if now - start > self._silence_limit / 2:
                heard = dict.fromkeys(heard, now)  # it was this process that stood still, perhaps with its whole node
            for peer in ready:
                heard[peer] = now
                data = _receive(self._peers[peer])
                *lines, unread[peer] = (unread[peer] + data).split(b"\n")
                for line in lines:
                    self._take(peer, *json.loads(line))
                if not data:
                    self._closed(peer)
            if any(now - heard[peer] > self._silence_limit for peer in self._peers):
                # With a whole node its ranks fall silent almost together.
                silent = [self._names[peer] for peer in self._peers if now - heard[peer] > self._silence_limit / 2]
                self._fail(f"no answer for {self._silence_limit:g} s from {', '.join(silent)}: hangs, or is cut off")
        if self._fatal:
            os._exit(1)  # the main thread may wait in a collective for ever

    def _take(self, peer: int, kind: str, text: str) -> None:
        """Act on a message."""
        if kind == FAILED:
            self._fail(text)
            self._drop(peer)  # so that it need not wait for us
        elif kind == DONE:
            self._done.add(peer)
            if self._rank == 0 and len(self._done) == len(self._names) - 1:
                self._all_done.set()
            elif self._rank:
                self._drop(peer)  # rank 0 is the last to say so

    def _closed(self, peer: int) -> None:
        """A connection has ended."""
        if peer not in self._done:
            self._fail(
                f"{self._names[peer]} ended without a word: it was killed or crashed; its screen and dmesg may say why"
            )
        self._drop(peer)

    def _fail(self, text: str) -> None:
        """A rank has failed: print it, pass it on, and end soon. Only the first counts, the others follow from it."""
        if self._ends_at is not None:
            return
        self._fatal = True
        self._ends_at = time.monotonic() + FAREWELL
        print_at_once(f"error [rank {self._rank}]: {text}")
        self._send(FAILED, text)

    def _send(self, kind: str, text: str = "") -> None:
        line = json.dumps([kind, text]).encode() + b"\n"
        with self._sending:
            for connection in self._peers.values():
                with contextlib.suppress(OSError):  # a peer that is gone or hangs is noticed where we listen
                    connection.sendall(line)

    def _drop(self, peer: int) -> None:
        with self._sending:
            connection = self._peers.pop(peer, None)
            if connection is not None:
                self._selector.unregister(connection)
                connection.close()


def print_at_once(line: str) -> None:
    """Print to stderr from a thread, though the main thread may hold the lock of sys.stderr and wait for ever."""
    clear = "\r\x1b[K" if os.isatty(2) else ""  # of a progress bar
    os.write(2, f"{clear}{line}\n".encode(errors="replace"))


def _receive(connection: socket.socket) -> bytes:
    """What has arrived; nothing if the connection has ended."""
    try:
        return connection.recv(65536)
    except OSError:
        return b""
