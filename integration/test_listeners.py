"""Every socket on which something of this project listens is known, bound to an address that was chosen, and told."""

import ast
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from listeners import beyond_loopback, listeners

PACKAGES = Path(__file__).parents[1] / "packages"
OPENS = {
    *("start_server", "create_server", "start_unix_server", "create_unix_server", "listen"),
    *("TCPServer", "HTTPServer", "ThreadingHTTPServer", "ThreadingTCPServer", "serve_forever"),
    # torch's, which listen on every address unless they are given a socket.
    *("TCPStore", "rendezvous"),
}
KNOWN = {
    # Where people reach a run, and the dashboard: refused beyond loopback, or guarded by a token.
    "pearl_executor/loopback_http.py",
    # Children of a run: a Unix socket in a private folder, or the node's address on Ray with a secret for each child.
    "pearl_executor/runtimes/local/channels.py",
    "pearl_executor/runtimes/local/frames.py",
    "pearl_executor/runtimes/local/worker.py",
    "pearl_executor/runtimes/local/polling.py",
    "pearl_executor/runtimes/local/handover.py",
    # Stand-ins for tests.
    "pearl_executor/testing/sglang/http.py",
    # The planner as a guest, and what verifiers' environments talk to.
    "pearl_planner/__main__.py",
    "pearl_planner/serve.py",
    "pearl_rl/rollout/environments/chat_endpoint.py",
    # Whether nodes reach the driver: open for a moment.
    "pearl_rl/cli/doctor_cluster.py",
    # Training ranks find each other.
    "pearl_rl/training/meeting.py",
    # SGLang's ranks: in the server's processes, and in the sender of weights by broadcast.
    "pearl_executor/engines/sglang/served.py",
    "pearl_executor/engines/sglang/sender_child.py",
}
ANYWHERE = {"0.0.0.0", "::", ""}


@cache
def sources():
    return [
        (str(file.relative_to(PACKAGES)).partition("/src/")[2], ast.parse(file.read_text()))
        for file in sorted(PACKAGES.glob("*/src/**/*.py"))
    ]


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, node


def test_whoever_opens_a_listening_socket_is_known():
    found = {file for file, tree in sources() for name, _ in calls(tree) if name in OPENS}
    assert found <= KNOWN, f"who else listens, where, and who is told? {sorted(found - KNOWN)}"


def test_a_store_of_torchs_is_always_given_a_socket_that_was_bound_before():
    """It takes no address: by itself it listens on all of them."""
    found = {}
    for file, tree in sources():
        for name, node in calls(tree):
            given = {keyword.arg for keyword in node.keywords}
            # By position it is told whether it keeps the store.
            keeps = any(isinstance(argument, ast.Constant) and argument.value is True for argument in node.args)
            if name in ("TCPStore", "store") and keeps:
                found[file] = "master_listen_fd" in given
            assert name != "init_process_group" or "store" in given
    assert len(found) == 3
    assert all(found.values())


def test_nothing_binds_to_every_address_by_default():
    """No literal of ours names them; a person may."""
    found = [
        (file, node.lineno)
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ANYWHERE - {""}
    ]
    assert not found


def test_the_walk_itself_sees_a_listener_of_a_child_and_tells_where_it_is_bound():
    code = "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print('ready', flush=True); input()"
    for host, beyond in (("127.0.0.1", False), ("0.0.0.0", True)):
        child = subprocess.Popen(
            [sys.executable, "-c", code, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout.readline() == "ready\n"
            assert [address.rpartition(":")[0] for address in listeners(child.pid)] == [host]
            assert bool(beyond_loopback(child.pid)) == beyond
            assert any(address.startswith(f"{host}:") for address in listeners(os.getpid()))
        finally:
            child.communicate("\n")


def test_the_walk_reads_addresses_of_both_kinds():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        assert f"::1:{server.getsockname()[1]}" in listeners(os.getpid())
