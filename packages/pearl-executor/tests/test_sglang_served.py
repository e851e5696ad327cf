"""What runs in SGLang's interpreter keeps sockets on the chosen address, tells who listens, and ends what is open."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from importlib import resources

from pearl_executor.engines.sglang import served
from pearl_executor.engines.sglang.launch import SERVE, order_line

TEXT = resources.files("pearl_executor.engines.sglang").joinpath("served.py").read_text()


def run(code: str, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Another interpreter, in a group of its own, that has the module as text only."""
    begin = f"import json, os, sys\nmodule = {{'__name__': 'served'}}\nexec({TEXT!r}, module)\n"
    return subprocess.run(
        [sys.executable, "-I", "-c", begin + code, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(env or {})},
        process_group=0,
    )


BINDS = """
import socket
found = module["bind_to"](sys.argv[1], "")
def bound(family, kind, host, **options):
    with socket.socket(family, kind) as s:
        if family == socket.AF_INET6:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        s.bind((host, 0))
        return s.getsockname()[0]
V4, V6, TCP, UDP = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
answer = [bound(V4, TCP, "0.0.0.0"), bound(V4, TCP, "127.0.0.3"), bound(V4, UDP, "0.0.0.0"), bound(V6, TCP, "::")]
try:
    socket.create_server(("192.0.2.77", 0))
except OSError as error:
    answer.append(error.errno)
print(json.dumps([found, *answer]))
"""


def test_libraries_that_bind_tcp_to_every_address_bind_to_the_chosen_one_and_nothing_else_changes():
    done = run(BINDS, "127.0.0.2")
    assert not done.stderr
    found, wildcard, explicit, udp, both, errno = json.loads(done.stdout)
    assert found >= 1
    assert (wildcard, explicit, udp, both) == ("127.0.0.2", "127.0.0.3", "0.0.0.0", "::ffff:127.0.0.2")
    # What bind itself says goes through.
    assert errno == 99


def test_libraries_elsewhere_are_left_alone():
    code = "import socket\nfound = module['bind_to']('127.0.0.2', 'no-such-library')\n"
    done = run(code + "s = socket.create_server(('0.0.0.0', 0)); print(found, s.getsockname()[0])")
    assert done.stdout == "0 0.0.0.0\n"


def watched(*listening: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A server that listens at the first address, and also at the others, and lives until it is looked at again."""
    code = """
import socket, threading
module["_LOOK_S"] = module["_AGAIN_S"] = 0.01
servers = [socket.create_server((host, 0)) for host in sys.argv[1:]]
port = servers[0].getsockname()[1]
look, again, times = module["listeners"], threading.Event(), iter(range(2))
def counted(group):
    # A second look begins once all that follows from the first is done.
    if next(times, 1):
        again.set()
    return look(group)
module["listeners"] = counted
threading.Thread(target=module["_watch"], args=(sys.argv[1], port), daemon=True).start()
print("alive" if again.wait(50.0) else "never looked at again")
"""
    return run(code, *listening, env=env)


def test_a_server_says_where_it_listens():
    done = watched("127.0.0.2", "127.0.0.1")
    assert done.returncode == 0
    said, alive = done.stdout.splitlines()
    assert said.startswith("PEARL: this server listens on 127.0.0.1:")
    assert ", 127.0.0.2:" in said
    assert alive == "alive"


def test_a_server_that_others_could_reach_is_ended_and_says_for_which_port():
    done = watched("127.0.0.1", "0.0.0.0")
    assert done.returncode == -signal.SIGKILL
    assert "it is ended, for 0.0.0.0:" in done.stdout
    assert "neither loopback nor 127.0.0.1; allow it by engine.sglang.open_ports = true" in done.stdout
    assert "alive" not in done.stdout


def test_a_person_may_allow_it():
    done = watched("127.0.0.1", "0.0.0.0", **{served.OPEN_PORTS: "1"})
    assert done.returncode == 0
    assert "listens on" in done.stdout
    assert "alive" in done.stdout


def test_the_kernel_is_asked_for_a_whole_group_and_both_kinds_of_address():
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.create_server(("127.0.0.1", 0)) as four,
    ):
        found = served.listeners(os.getpgid(0))
        assert {f"::1:{six.getsockname()[1]}", f"127.0.0.1:{four.getsockname()[1]}"} <= found
    assert not served.listeners(1 << 30)


def test_a_scheduler_process_makes_its_function_from_the_text():
    """A new interpreter has no file of this module."""
    carried = pickle.dumps(served._Scheduler(TEXT))
    code = "import pickle\nfunction = pickle.loads(bytes.fromhex(sys.argv[1]))\nprint(function.__name__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys\n" + code, carried.hex()],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("run_scheduler\n", "")


def test_ranks_are_told_to_meet_at_a_socket_on_the_chosen_address_where_one_does_for_all():
    code = """
from types import SimpleNamespace
meeting = module["_meeting"]("127.0.0.2", SimpleNamespace(dp_size=1, nnodes=1))
told = [os.environ[name] for name in ("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "MASTER_ADDR", "MASTER_PORT")]
others = [module["_meeting"]("127.0.0.2", SimpleNamespace(dp_size=d, nnodes=n)) for d, n in ((2, 1), (1, 2))]
print(json.dumps([told, meeting.getsockname(), others]))
"""
    done = run(code)
    (method, host, port), bound, others = json.loads(done.stdout)
    assert (method, host, int(port)) == ("env://", *bound)
    assert others == [None, None]


def test_what_a_server_is_started_with_is_on_no_command_line():
    order = json.loads(order_line(["--admin-api-key", "secret"], {"A": "b"}))
    assert order == {"args": ["--admin-api-key", "secret"], "env": {"A": "b"}, "module": TEXT}
    assert "secret" not in SERVE


def test_interfaces_are_found_by_their_address():
    assert served.interface_of("127.0.0.1") == "lo"
    assert served.interface_of("192.0.2.250") == "lo", "an address of nobody's"
