"""Behaves like the Python of the SGLang environment, through its fork server: `interpreter.py SOCKET -c CODE`."""

import array
import json
import os
import signal
import socket
import sys


def main() -> int:
    """Have the code run, and end as it ended."""
    path, option, code = sys.argv[1:4]
    if option != "-c":
        print("only -c CODE", file=sys.stderr)
        return 2
    # The child is in this process group and gets every signal itself; this process lasts as long as it does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = {
        "code": code,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "group": os.getpgid(0),
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    fds = array.array("i", [0, 1, 2])
    data = json.dumps(request).encode() + b"\n"
    sent = connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    connection.sendall(data[sent:])
    answer = b""
    while not answer.endswith(b"\n"):
        got = connection.recv(64)
        if not got:
            return 1
        answer += got
    ended = int(answer)
    if ended < 0:
        signal.signal(-ended, signal.SIG_DFL) if -ended not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -ended)
    return ended


if __name__ == "__main__":
    sys.exit(main())
