import os
import socket
from contextlib import closing

import pytest

from moe_int8.parallel import network
from moe_int8.parallel.network import (
    Doorbell,
    Interface,
    choose_interface,
    interface_towards,
    interfaces,
    is_own,
    is_selected,
    ring,
)

LO, ETH0, IB0 = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1"), Interface("ib0", "10.1.0.1")


def test_this_machine():
    assert LO in interfaces()
    assert interface_towards("127.0.0.1") == LO
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.7")  # reserved for documentation: nobody has it


@pytest.fixture(params=["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def variable(request, monkeypatch) -> str:
    """The variable, unset, on a node with three interfaces of which eth0 reaches node 0."""
    monkeypatch.setattr(network, "interfaces", lambda: [LO, ETH0, IB0])
    monkeypatch.setattr(network, "interface_towards", lambda address: ETH0)
    monkeypatch.setenv(request.param, "")  # restored after the test, whatever it sets
    monkeypatch.delenv(request.param)
    return request.param


def test_c60_without_the_variable_it_says_what_to_set(variable):
    expected = f"{variable} is not set: export {variable}=eth0, which reaches node 0 at 10.0.0.2"
    with pytest.raises(ValueError, match=expected):
        choose_interface("10.0.0.2", variable, set_it=False)
    assert variable not in os.environ


def test_with_a_script_to_start_it_is_set(variable):
    assert choose_interface("10.0.0.2", variable, set_it=True) == ETH0
    assert os.environ[variable] == "eth0"


def test_what_the_user_has_set_stays(variable, monkeypatch):
    monkeypatch.setenv(variable, "ib0")
    assert choose_interface("10.0.0.2", variable, set_it=True) == IB0
    assert os.environ[variable] == "ib0"


@pytest.mark.parametrize(
    "value, message",
    [
        ("enp3s0", r"=enp3s0 names no interface of this node with an address \(lo, eth0, ib0\): export .*=eth0"),
        ("lo", "=lo has no address that other nodes reach: export .*=eth0"),
    ],
)
def test_c60_a_variable_that_cannot_work(variable, value, message, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable + message):
        choose_interface("10.0.0.2", variable, set_it=False)


def test_a_link_local_address_is_not_taken(variable, monkeypatch):
    both = [Interface("ib0", "fe80::1"), Interface("ib0", "fd00::1")]
    monkeypatch.setattr(network, "interfaces", lambda: [LO, ETH0, *both])
    monkeypatch.setenv(variable, "ib0")
    assert choose_interface("10.0.0.2", variable, set_it=False) == both[1]


@pytest.mark.parametrize(
    "variable, value, selected",
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ["eth0"]),
        ("GLOO_SOCKET_IFNAME", "eth", []),  # gloo takes whole names
        ("GLOO_SOCKET_IFNAME", "ib0,eth1", ["eth1", "ib0"]),
        ("NCCL_SOCKET_IFNAME", "eth", ["eth0", "eth1"]),  # NCCL takes prefixes,
        ("NCCL_SOCKET_IFNAME", "=eth", []),  # whole names after =,
        ("NCCL_SOCKET_IFNAME", "=eth1", ["eth1"]),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", ["eth0", "eth1", "ib0"]),  # and what to avoid after ^
    ],
)
def test_which_interfaces_a_variable_selects(variable, value, selected):
    names = ["lo", "docker0", "eth0", "eth1", "ib0"]
    assert [name for name in names if is_selected(name, variable, value)] == selected


def test_doorbells_that_answer_and_one_that_does_not():
    with closing(Doorbell(LO, 2)) as first, closing(Doorbell(LO, 2)) as second:
        assert first.address != second.address
        assert (
            ring([["203.0.113.7", 1], first.address, None, second.address], own=0) == "every other node can be reached"
        )
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # and does not listen
            port = closed.getsockname()[1]
            expected = rf"cannot reach node 1 at 127.0.0.1, port {port} \(Connection refused\): .*open all TCP ports"
            with pytest.raises(ValueError, match=expected):
                ring([first.address, ["127.0.0.1", port], second.address], own=2)
