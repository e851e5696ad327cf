"""Which TCP ports the processes of a run listen on, and at which address: from the kernel, not from what they say."""

import ipaddress
import os
import struct
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def listeners(root: int, *, group: bool = False) -> dict[str, set[str]]:
    """Address → command lines, of every listening TCP socket of `root` and all processes below it (Linux).

    With `group`, of the processes in the group that `root` leads instead.
    """
    bound = {
        fields[9]: _address(fields[1])
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
        if (fields := line.split())[3] == LISTEN
    }
    found: dict[str, set[str]] = {}
    for pid in _group(root) if group else _below(root):
        try:
            command = Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            entries = list(Path("/proc", str(pid), "fd").iterdir())
        except OSError:
            # It ended while we looked.
            continue
        targets = []
        for entry in entries:
            with suppress(OSError):
                targets.append(os.readlink(entry))
        for target in targets:
            inode = target.removeprefix("socket:[").removesuffix("]")
            if inode in bound:
                found.setdefault(bound[inode], set()).add(command[:120])
    return found


def beyond_loopback(root: int) -> dict[str, set[str]]:
    """Of these, those that somebody on another machine could reach."""
    return {
        address: commands
        for address, commands in listeners(root).items()
        if not ipaddress.ip_address(address.rpartition(":")[0]).is_loopback
    }


def _group(leader: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == leader:
                    found.add(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def _below(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += children.get(pid, [])
    return found


def _address(text: str) -> str:
    """Of /proc/net/tcp: words of the address in the machine's order, and the port, both in hexadecimal."""
    host, _, port = text.partition(":")
    words = struct.pack(f"<{len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8)))
    address = ipaddress.ip_address(words)
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{int(port, 16)}"
