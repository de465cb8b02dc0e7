"""The nodes of a launch in touch before torchrun starts: JSON lines over the master port, which node 0 hosts.

Not torch's store: that one logs a stack trace for every peer that is late, and cannot say who it was.
"""

import json
import select
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

MAX_LINE = 16 << 20  # bytes; a stranger on the port cannot fill the memory
HELLO_SECONDS = 5.0  # a stranger that says nothing is not waited for longer
RETRY_SECONDS = 0.3


class NodesError(ValueError):
    """The nodes are not all there: one line that names those that are missing, and what to check."""


class Nodes:
    """The nodes of one launch, in touch between `Nodes(...)` and `close`, after which the port is free again.

    Every node calls `exchange` equally often.

    Args:
        rank: this node's; node 0 hosts.
        size: number of nodes; 1 is alone and only holds the port.
        address, port: of node 0.
        timeout: seconds for which a node waits for the others, in each step.

    Raises:
        NodesError: on node 0, the port is taken; on the others, node 0 does not answer.
    """

    def __init__(self, rank: int, size: int, address: str, port: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._peers: dict[int, _Peer] = {}  # node 0 has one for each other node, the others have one for node 0
        self._refused: list[_Peer] = []  # kept open until `close`, so that they can read why
        self._listener: socket.socket | None = None
        if rank == 0:
            self._listener = _listen(address, port, size)
        else:
            self._peers[0] = self._connect(address, port)
            self._peers[0].send({"node": rank})

    def __str__(self) -> str:
        return f"{self.where} is free" if self.rank == 0 else f"{self.where} answers"

    def exchange(self, value: Any) -> list[Any]:
        """Every node's value (anything that JSON holds) by node rank, on every node.

        Raises:
            NodesError: names the nodes that did not come or have left.
        """
        if self.rank:
            return self._ask(value)
        try:
            self._admit()
            values = [value, *(self._from(node) for node in range(1, self.size))]
        except NodesError as error:
            _tell(self._peers.values(), {"error": str(error)})
            raise
        _tell(self._peers.values(), {"values": values})
        return values

    def close(self) -> None:
        """Leave. Node 0 leaves first: when the others return, torchrun can have the port."""
        if self.rank:
            self._peers[0].gone_within(self.timeout)
        if self._listener:
            self._listener.close()
        for peer in (*self._peers.values(), *self._refused):
            peer.close()

    def _connect(self, address: str, port: int) -> "_Peer":
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return _Peer(socket.create_connection((address, port), timeout=min(HELLO_SECONDS, self.timeout)))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise NodesError(self._unreachable(error)) from error
                time.sleep(RETRY_SECONDS)

    def _unreachable(self, error: OSError) -> str:
        silence = f"node 0 does not answer at {self.where} within {self.timeout:g} s"
        if isinstance(error, ConnectionRefusedError):
            return (
                f"{silence}, though its machine does: run preflight.py there too, with --node-rank 0 and the same "
                "--master-addr and --master-port, or see its screen for what failed"
            )
        return (
            f"{silence} ({error.strerror or error}): check --master-addr, that its machine is up, and that no firewall "
            "between the nodes closes the port"
        )

    def _ask(self, value: Any) -> list[Any]:
        host = self._peers[0]
        try:
            with suppress(ConnectionError):  # node 0 may have refused this node; its reason can still be read
                host.send(value)
            answer = host.receive(2 * self.timeout)  # node 0 may begin to wait for the rest later than this node
            if "error" in answer:
                raise NodesError(answer["error"])
            return list(answer["values"])
        except TimeoutError:
            raise NodesError(f"node 0 at {self.where} is silent: see its screen, or what else uses the port") from None
        except (OSError, LookupError, TypeError, json.JSONDecodeError):
            raise NodesError(
                f"node 0 at {self.where} has left: see its screen; if it went on without this node, --node-rank "
                f"{self.rank} was given twice, or another --nnodes there"
            ) from None

    def _admit(self) -> None:
        """Node 0: take connections until every node has one."""
        assert self._listener is not None
        deadline = time.monotonic() + self.timeout
        while missing := [node for node in range(1, self.size) if node not in self._peers]:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                peer = _Peer(self._listener.accept()[0])
            except TimeoutError:
                raise NodesError(self._absent(missing)) from None
            try:
                self._place(int(peer.receive(HELLO_SECONDS)["node"]), peer)
            except (OSError, LookupError, TypeError, ValueError):
                peer.close()  # a stranger: a port scan, another program

    def _place(self, node: int, peer: "_Peer") -> None:
        if not 1 <= node < self.size:
            peer.refusal = f"node 0 was started with --nnodes {self.size}, which leaves no --node-rank {node}"
        elif node in self._peers and not self._peers[node].gone_within(0):
            peer.refusal = (
                f"--node-rank {node} was given twice, at {self._peers[node].address} and at {peer.address}: "
                "give every node its own"
            )
        else:
            self._peers[node] = peer  # perhaps in place of one that was interrupted and started again
            return
        self._refused.append(peer)
        _tell([peer], {"error": peer.refusal})

    def _absent(self, missing: list[int]) -> str:
        nodes = " and ".join(f"node {node}" for node in missing)
        line = (
            f"{nodes} did not come to {self.where} within {self.timeout:g} s: run preflight.py there too, with "
            f"--nnodes {self.size}, its own --node-rank and the same --master-addr and --master-port, or see its screen"
        )
        return "; ".join([line, *dict.fromkeys(peer.refusal for peer in self._refused)])

    def _from(self, node: int) -> Any:
        try:
            return self._peers[node].receive(self.timeout)
        except (OSError, ValueError):
            raise NodesError(f"node {node} has left or is silent: see its screen") from None


class _Peer:
    """A connection that carries JSON, a value a line.

    Attributes:
        address: of the other side.
        refusal: why node 0 did not take it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.address = connection.getpeername()[0]
        self.refusal = ""
        self._connection = connection
        self._reader = connection.makefile("rb")

    def send(self, value: Any) -> None:
        self._connection.settimeout(HELLO_SECONDS)
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, seconds: float) -> Any:
        """The next value; OSError if there is none in time or the other side has left, ValueError if it is not JSON."""
        self._connection.settimeout(seconds)
        line = self._reader.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the other side has left")
        return json.loads(line)

    def gone_within(self, seconds: float) -> bool:
        """Wait until the other side has closed, even with something unread; whether it has."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


def _tell(peers: Iterable[_Peer], message: Any) -> None:
    for peer in peers:
        with suppress(OSError):  # it has left: whoever needs it will notice
            peer.send(message)


def _listen(address: str, port: int, size: int) -> socket.socket:
    """On every address of this node, as torchrun will."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=max(size, 8))
    except OSError as error:
        raise NodesError(
            f"port {port} cannot be used on this node ({error.strerror}): end what holds it (ss -ltnp shows it), or "
            "give another --master-port on every node"
        ) from error
