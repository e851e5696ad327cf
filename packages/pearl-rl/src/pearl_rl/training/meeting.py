"""Where ranks on several machines meet: a store that rank 0 keeps, on the address that it has in the cluster."""

import fcntl
import socket
import struct
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store, TCPStore

from pearl_executor.runtimes.local.frames import listen, tcp_address, tcp_text

LOOPBACK: Final = "lo"
_SIOCGIFADDR: Final = 0x8915


def open_store(address: str, ranks: int, timeout_s: float) -> tuple[Store, str]:
    """Rank 0's store; it listens at `address` (`tcp://`, port 0 for a free one) only. Returns it and where it is."""
    listener, final = listen(address)
    tcp = tcp_address(final)
    assert tcp is not None
    store = TCPStore(
        *tcp,
        ranks,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, tcp_text(*tcp)


def reach_store(address: str, ranks: int, timeout_s: float) -> Store:
    """Another rank's view of the store at `address`."""
    tcp = tcp_address(address)
    assert tcp is not None
    return TCPStore(*tcp, ranks, False, timedelta(seconds=timeout_s))


def interface_of(address: str) -> str:
    """Network interface that has the host of a `tcp://` address; loopback for a path, and where none has it."""
    tcp = tcp_address(address)
    if tcp is None:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # An interface without an IPv4 address.
                continue
            if socket.inet_ntoa(answer[20:24]) == tcp[0]:
                return name
    return LOOPBACK
