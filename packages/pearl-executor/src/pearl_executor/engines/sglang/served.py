"""Runs in SGLang's interpreter: its server, with every listening socket on the chosen address.

Standard library only, and nothing of PEARL: the text of this file travels to the interpreter or container, and from
there to the schedulers, which are new processes. Three things in them listen on every address of the machine and have
no setting for it:

- torch's store for a scheduler's ranks. SGLang takes a store from outside (`env://`), so the first rank keeps one on a
  socket that was bound here.
- Mooncake's handshake and, over TCP, its transfers. Both bind to the wildcard address, hard-coded. Their calls of
  `bind` go through a table of the loaded libraries, whose entry is replaced by one that takes the chosen address.

Whatever listens is then looked up in the kernel and told, and a server that anybody else could reach is ended.
"""

import ctypes
import fcntl
import importlib
import ipaddress
import os
import platform
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

OPEN_PORTS = "PEARL_SGLANG_OPEN_PORTS"
"""Environment: set where a person allows listeners on other addresses."""
_SIOCGIFADDR = 0x8915
_LOOK_S = 1.0
_AGAIN_S = 10.0
_LISTEN = "0A"
_kept: list[Any] = []
"""What must live as long as the process."""


def main(arguments: list[str], text: str) -> None:
    """Be the server that `arguments` describe; `text` is this module's."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    http = importlib.import_module("sglang.srt.entrypoints.http_server")
    server = importlib.import_module("sglang.srt.server_args").prepare_server_args(arguments)
    server.resolve_once()
    host = arguments[arguments.index("--host") + 1]
    port = int(arguments[arguments.index("--port") + 1])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface_of(host))
    meeting = _meeting(host, server)
    threading.Thread(target=_watch, args=(host, port), daemon=True).start()
    http.launch_server(server, run_scheduler_process_func=partial(_Scheduler(text), host, meeting))


class _Scheduler:
    """`run_scheduler`, which another interpreter makes from this module's text, having no file of it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self, *arguments: Any) -> None:
        run_scheduler(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        names = {"text": self._text, "module": {"__name__": __name__}}
        return eval, ("exec(text, module) or module['run_scheduler']", names)


def run_scheduler(host: str, meeting: socket.socket | None, *arguments: Any) -> None:
    """SGLang's scheduler process; `meeting` is where its ranks find each other."""
    if meeting is not None:
        tensor_rank, pipeline_rank = arguments[3:5]
        if (tensor_rank, pipeline_rank) == (0, 0):
            _keep_store(host, meeting)
        meeting.close()
    with suppress(ImportError):
        # SGLang says itself what is missing where it needs it.
        importlib.import_module("mooncake.engine")
        bind_to(host, "mooncake")
    importlib.import_module("sglang.srt.managers.scheduler").run_scheduler_process(*arguments)


def _end_with_parent() -> None:
    """Standard input is the parent's pipe: when it ends, so does everything here."""
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


# ---- torch's store ---------------------------------------------------------------------------------------------------


def _meeting(host: str, server: Any) -> socket.socket | None:
    """A bound socket for the store of the ranks, and SGLang told of it; None where one store would not do."""
    if getattr(server, "dp_size", 1) > 1 or getattr(server, "nnodes", 1) > 1:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    meeting = socket.create_server((host, 0), family=family)
    os.environ.update(
        SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE="env://",
        TORCHELASTIC_USE_AGENT_STORE="True",
        MASTER_ADDR=host,
        MASTER_PORT=str(meeting.getsockname()[1]),
    )
    return meeting


def _keep_store(host: str, meeting: socket.socket) -> None:
    store = importlib.import_module("torch.distributed").TCPStore
    port = meeting.getsockname()[1]
    _kept.append(store(host, port, None, True, wait_for_workers=False, master_listen_fd=os.dup(meeting.fileno())))


def interface_of(host: str) -> str:
    """Network interface that has `host`; loopback where none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return "lo"


# ---- libraries that bind to the wildcard address ---------------------------------------------------------------------


class _Header(ctypes.Structure):
    """Of a segment: Elf64_Phdr."""

    _fields_ = [
        *(("kind", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("offset", ctypes.c_uint64)),
        *((name, ctypes.c_uint64) for name in ("address", "physical", "file_bytes", "memory_bytes", "align")),
    ]


class _Library(ctypes.Structure):
    """Of a loaded object: the beginning of struct dl_phdr_info."""

    _fields_ = [
        *(("base", ctypes.c_uint64), ("name", ctypes.c_char_p)),
        *(("headers", ctypes.POINTER(_Header)), ("count", ctypes.c_uint16)),
    ]


_DYNAMIC = 2
_STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATIONS_BYTES, _JUMPS, _JUMPS_BYTES = 5, 6, 7, 8, 23, 2
_POINTERS = {"x86_64": (1, 6, 7), "aarch64": (257, 1025, 1026)}
"""Relocations that hold a function's address: absolute, global data, jump slot."""
_RELOCATION = struct.Struct("<QQq")
_SYMBOL_BYTES = 24
_BIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)


def bind_to(host: str, part: str) -> int:
    """Have loaded libraries with `part` in their path bind TCP sockets to `host` where they would to every address.

    Returns how many libraries that concerns.
    """
    real = _BIND(("bind", ctypes.CDLL(None, use_errno=True)))

    def bind(descriptor: int, address: int, size: int) -> int:
        chosen = ctypes.create_string_buffer(_instead(ctypes.string_at(address, size), descriptor, host), size)
        return int(real(descriptor, ctypes.addressof(chosen), size))

    hook = _BIND(bind)
    _kept.append(hook)
    pointer = ctypes.cast(hook, ctypes.c_void_p).value
    assert pointer is not None
    found = 0
    for base, dynamic in _libraries(part):
        places = list(_places(base, dynamic, b"bind"))
        for place in places:
            _write(place, pointer)
        found += bool(places)
    return found


def _instead(address: bytes, descriptor: int, host: str) -> bytes:
    """The socket address to bind to: `host` for a stream socket's wildcard address, else what it is."""
    (family,) = struct.unpack_from("=H", address)
    with socket.socket(fileno=os.dup(descriptor)) as probe:
        if probe.type != socket.SOCK_STREAM:
            return address
    chosen = ipaddress.ip_address(host)
    if family == socket.AF_INET and address[4:8] == bytes(4) and chosen.version == 4:
        return address[:4] + chosen.packed + address[8:]
    if family == socket.AF_INET6 and address[8:24] == bytes(16):
        packed = chosen.packed if chosen.version == 6 else bytes(10) + b"\xff\xff" + chosen.packed
        return address[:8] + packed + address[24:]
    return address


def _libraries(part: str) -> list[tuple[int, dict[int, int]]]:
    """Where libraries with `part` in their path are loaded, and what their dynamic sections say."""
    found: list[tuple[int, dict[int, int]]] = []

    def look(library: Any, size: int, data: int) -> int:
        del size, data
        info = library.contents
        if part in (info.name or b"").decode(errors="replace"):
            headers = [info.headers[i] for i in range(info.count)]
            found.extend((info.base, _dynamic(info.base + h.address)) for h in headers if h.kind == _DYNAMIC)
        return 0

    visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(visit(look), None)
    return found


def _dynamic(address: int) -> dict[int, int]:
    entries: dict[int, int] = {}
    while (tag := ctypes.c_int64.from_address(address).value) != 0:
        entries[tag] = ctypes.c_uint64.from_address(address + 8).value
        address += 16
    return entries


def _places(base: int, dynamic: dict[int, int], function: bytes) -> Iterator[int]:
    """Addresses of the entries through which a library calls `function`."""
    # glibc writes addresses into this section as it loads, other loaders leave offsets.
    at = {tag: value if value >= base else base + value for tag, value in dynamic.items()}
    for begin, size in ((_JUMPS, _JUMPS_BYTES), (_RELOCATIONS, _RELOCATIONS_BYTES)):
        if begin not in dynamic:
            continue
        table = ctypes.string_at(at[begin], dynamic.get(size, 0))
        for offset, info, _ in _RELOCATION.iter_unpack(table):
            if info & 0xFFFFFFFF in _POINTERS.get(platform.machine(), ()):
                symbol = at[_SYMBOLS] + (info >> 32) * _SYMBOL_BYTES
                name = at[_STRINGS] + ctypes.c_uint32.from_address(symbol).value
                if ctypes.string_at(name) == function:
                    yield base + offset


def _write(place: int, pointer: int) -> None:
    """Write `pointer` at `place`, which may be read-only since the library was loaded."""
    page = os.sysconf("SC_PAGESIZE")
    start, readable_and_writable = place // page * page, 3
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), readable_and_writable):
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.c_uint64.from_address(place).value = pointer


# ---- who listens -----------------------------------------------------------------------------------------------------


def _watch(host: str, port: int) -> None:
    """Say who listens once the server is up and whenever that changes; end it where others could reach it."""
    known: set[str] = set()
    pause = threading.Event()
    while True:
        found = listeners(os.getpgid(0))
        if known or f"{host}:{port}" in found:
            if found - known:
                print(f"PEARL: this server listens on {', '.join(sorted(found))}", flush=True)
            known |= found
            open_ = sorted(address for address in found if not _expected(address, host))
            if open_ and not os.environ.get(OPEN_PORTS):
                print(f"PEARL: it is ended, for {', '.join(open_)} is neither loopback nor {host}; allow it by "
                      "engine.sglang.open_ports = true behind a firewall", flush=True)  # fmt: skip
                os.killpg(os.getpgid(0), signal.SIGKILL)
        pause.wait(_AGAIN_S if known else _LOOK_S)


def _expected(address: str, host: str) -> bool:
    name = address.rpartition(":")[0]
    return ipaddress.ip_address(name).is_loopback or name == host


def listeners(group: int) -> set[str]:
    """`address:port` of every TCP socket on which a process of that group listens, from the kernel (Linux)."""
    bound = {
        fields[9]: _address(fields[1])
        for table in ("tcp", "tcp6")
        if (file := Path("/proc/net", table)).exists()
        for line in file.read_text().splitlines()[1:]
        if (fields := line.split())[3] == _LISTEN
    }
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # A process may end while we look.
        with suppress(OSError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            for descriptor in (entry / "fd").iterdir():
                with suppress(OSError):
                    inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
                    if inode in bound:
                        found.add(bound[inode])
    return found


def _address(text: str) -> str:
    """Of /proc/net/tcp: words of the address in the machine's order, and the port, both in hexadecimal."""
    host, _, port = text.partition(":")
    words = (int(host[at : at + 8], 16) for at in range(0, len(host), 8))
    address = ipaddress.ip_address(struct.pack(f"={len(host) // 8}I", *words))
    return f"{getattr(address, 'ipv4_mapped', None) or address}:{int(port, 16)}"
