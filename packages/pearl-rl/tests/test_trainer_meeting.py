"""Ranks that may be on several machines meet in a store of rank 0, on its address in the cluster only."""

import socket

import pytest

pytest.importorskip("torch")

from pearl_executor.runtimes.local.frames import tcp_address
from pearl_rl.training.meeting import LOOPBACK, interface_of, open_store, reach_store

pytestmark = pytest.mark.torch


def test_a_store_listens_where_it_is_told_and_nowhere_else():
    store, address = open_store("tcp://127.0.0.1:0", 2, 10.0)
    host, port = tcp_address(address)
    assert host == "127.0.0.1"
    store.set("key", "value")
    assert reach_store(address, 2, 10.0).get("key") == b"value"
    with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
        socket.create_connection(("127.0.0.2", port), timeout=1.0)


def test_an_address_names_its_interface():
    assert interface_of("tcp://127.0.0.1:0") == LOOPBACK
    assert interface_of("/a/socket") == LOOPBACK
    assert interface_of("tcp://203.0.113.9:0") == LOOPBACK
