"""This node's addresses and interfaces (Linux), and whether the other nodes can be reached on any port."""

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CONNECT_SECONDS = 5.0  # for a connection inside a cluster, which takes milliseconds
SIOCGIFCONF = 0x8912  # ioctl: every IPv4 address of this machine, secondary ones too
IFREQ_BYTES = 40  # of struct ifreq on 64-bit Linux: a name of 16 bytes, then a sockaddr
MAX_ADDRESSES = 1024


@dataclass(frozen=True)
class Interface:
    """A network interface and one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def reaches_others(self) -> bool:
        """False for loopback, and for link-local addresses, which mean nothing without an interface's name."""
        address = ipaddress.ip_address(self.address)
        return not (address.is_loopback or address.is_link_local)


def interfaces() -> list[Interface]:
    """Every address of this node, IPv4 before IPv6; an interface with several comes several times."""
    buffer = array.array("B", bytes(IFREQ_BYTES * MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(probe, SIOCGIFCONF, request))[0]
    found = []
    for start in range(0, used, IFREQ_BYTES):
        label = bytes(buffer[start : start + 16]).split(b"\0")[0].decode()
        address = socket.inet_ntoa(bytes(buffer[start + 20 : start + 24]))
        found.append(Interface(label.split(":")[0], address))  # eth0:1 is a second address of eth0
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        found.append(Interface(name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def is_own(address: str) -> bool:
    """Whether this node has the address."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def interface_towards(address: str) -> Interface:
    """The interface by which this node reaches `address`, or the one that has it.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # UDP: looks the route up and sends nothing
        local = probe.getsockname()[0]
    name = next((interface.name for interface in interfaces() if interface.address == local), "?")
    return Interface(name, local)


def choose_interface(address: str, variable: str, *, set_it: bool) -> Interface:
    """The interface that the ranks of this node will use among the nodes.

    Args:
        address: of node 0.
        variable: NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME. Without it NCCL guesses among several interfaces, and gloo
            takes what the host's name stands for, which often is the loopback.
        set_it: if the variable is not set, set it to the interface that reaches node 0.

    Raises:
        ValueError: the variable is not set, or names no interface that can be used; says what to set.
    """
    route = interface_towards(address)
    if set_it:
        os.environ.setdefault(variable, route.name)
    value = os.environ.get(variable)
    advice = f"export {variable}={route.name}, which reaches node 0 at {address}"
    if not value:
        raise ValueError(f"{variable} is not set: {advice}")
    own = interfaces()
    chosen = [interface for interface in own if is_selected(interface.name, variable, value)]
    if not chosen:
        names = ", ".join(dict.fromkeys(interface.name for interface in own))
        raise ValueError(f"{variable}={value} names no interface of this node with an address ({names}): {advice}")
    usable = [interface for interface in chosen if interface.reaches_others]
    if not usable:
        raise ValueError(f"{variable}={value} has no address that other nodes reach: {advice}")
    return route if route in usable else usable[0]


def is_selected(name: str, variable: str, value: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME of this `value` selects the interface `name`.

    gloo takes a list of names. NCCL takes a list of prefixes, of names after "=", of prefixes to avoid after "^".
    """
    words = value.lstrip("^=").split(",")
    if variable.startswith("GLOO") or value.startswith("="):
        return name in words
    return name.startswith(tuple(words)) != value.startswith("^")


class Doorbell:
    """A port of this node for the others to try, as NCCL and gloo will open them: on the interface, any number."""

    def __init__(self, interface: Interface, backlog: int) -> None:
        family = _family(interface.address)
        self._listener = socket.create_server((interface.address, 0), family=family, backlog=backlog)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def close(self) -> None:
        self._listener.close()


def ring(doorbells: Sequence[Sequence[str | int] | None], own: int) -> str:
    """Connect to the `Doorbell.address` of every node but the own; None is a node without, which has said why.

    Raises:
        ValueError: names the nodes that cannot be reached.
    """
    others = [(node, doorbell) for node, doorbell in enumerate(doorbells) if doorbell and node != own]
    with ThreadPoolExecutor(len(others) or 1) as pool:  # a firewall that drops packets costs each the whole wait
        problems = [problem for problem in pool.map(_problem, others) if problem]
    if problems:
        raise ValueError(
            f"cannot reach {'; '.join(problems)}: ranks listen on ports that the system picks, so open all TCP ports "
            "between the nodes, or choose another interface"
        )
    return "every other node can be reached"


def _problem(other: tuple[int, Sequence[str | int]]) -> str:
    node, (host, port) = other
    try:
        socket.create_connection((str(host), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"node {node} at {host}, port {port} ({error.strerror or error})"
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
