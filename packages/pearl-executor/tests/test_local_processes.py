import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pearl_executor.runtimes.local.channels import CallTimeoutError, ChannelClosedError, RemoteError
from pearl_executor.runtimes.local.frames import FrameSocket
from pearl_executor.runtimes.local.processes import ForkServer, ProcessError

TARGETS = textwrap.dedent(
    """
    import os
    import select

    def echo(channel, arguments):
        while not channel.closed:
            select.select([channel], [], [])
            for frame in channel.receive():
                if frame.head["op"] == "quit":
                    return
                if frame.head["op"] == "refuse":
                    channel.send({"re": frame.head["call"], "error": "refused", "message": "not today"})
                elif frame.head["op"] != "ignore":
                    channel.send({"re": frame.head["call"], **arguments, "env": os.environ.get("MARK")}, frame.body)

    def await_parent(channel):
        # Only what happens after the parent took the connection is the end of a child that was started.
        select.select([channel], [], [])
        channel.receive()

    def fail(channel, arguments):
        await_parent(channel)
        raise ValueError("broken on purpose")

    def hush(channel, arguments):
        await_parent(channel)
        os._exit(3)
    """
)


def run(main):
    """Run an asyncio test with a bound on its whole duration."""
    asyncio.run(asyncio.wait_for(main, 60))


@contextlib.asynccontextmanager
async def fork_server(folder: Path, **options):
    (folder / "child_targets.py").write_text(TARGETS)
    async with ForkServer(folder / "logs", environment={"PYTHONPATH": str(folder)}, **options) as forks:
        yield forks


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def vanished(*pids: int) -> None:
    for _ in range(1000):
        if not any(alive(pid) for pid in pids):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"some of {pids} live on")


def test_a_child_answers_and_ends_when_its_target_returns(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            child = await forks.spawn("one", "child_targets:echo", {"x": [1, 2]}, environment={"MARK": "m"})
            answer = await child.channel.call("hello", body=b"abc", timeout_s=10)
            assert (answer.head["x"], answer.head["env"], answer.body) == ([1, 2], "m", b"abc")
            with pytest.raises(RemoteError, match="not today"):
                await child.channel.call("refuse", timeout_s=10)
            with pytest.raises(CallTimeoutError, match=r"no answer to 'ignore' within 0.05 s"):
                await child.channel.call("ignore", timeout_s=0.05)
            child.channel.notify({"op": "quit"})
            assert await child.exited == 0
            assert child.how_it_ended() == "exited with code 0"
            with pytest.raises(ChannelClosedError):
                await child.channel.call("hello", timeout_s=10)

    run(main())


def test_a_failure_is_told_by_the_last_line_of_its_log(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            child = await forks.spawn("bad", "child_targets:fail", {})
            child.channel.notify({"op": "go"})
            assert await child.exited == 1
            assert child.how_it_ended() == "exited with code 1: ValueError: broken on purpose"
            child = await forks.spawn("quiet", "child_targets:hush", {})
            child.channel.notify({"op": "go"})
            assert await child.exited == 3
            assert child.how_it_ended() == "exited with code 3"

    run(main())


def test_kill_ends_even_a_stopped_process_and_may_be_repeated(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            child = await forks.spawn("stopped", "child_targets:echo", {})
            os.kill(child.pid, signal.SIGSTOP)
            await forks.kill(child)
            await forks.kill(child)
            assert child.how_it_ended() == "ended by SIGKILL"
            assert not alive(child.pid)

    run(main())


def test_names_are_unique_among_the_living(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            child = await forks.spawn("same", "child_targets:echo", {})
            with pytest.raises(ProcessError, match="a process of that name lives"):
                await forks.spawn("same", "child_targets:echo", {})
            await forks.kill(child)
            await forks.spawn("same", "child_targets:echo", {})

    run(main())


def test_closing_leaves_no_process_and_no_file(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            children = [await forks.spawn(f"c{i}", "child_targets:echo", {}) for i in range(3)]
            os.kill(children[1].pid, signal.SIGSTOP)
            folder = forks.folder
        assert not any(alive(child.pid) for child in children)
        assert not folder.exists()
        with pytest.raises(ProcessError, match="not open"):
            await forks.spawn("late", "child_targets:echo", {})

    run(main())


def test_a_module_that_cannot_be_imported_is_named(tmp_path):
    async def main():
        async with fork_server(tmp_path, preload=["json", "no_such_module_here"]) as forks:
            with pytest.raises(ProcessError, match="cannot import no_such_module_here"):
                await forks.spawn("one", "child_targets:echo", {})

    run(main())


def test_children_die_with_the_fork_server_and_the_next_start_brings_a_new_one(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            child = await forks.spawn("first", "child_targets:echo", {})
            os.kill(parent_of(child.pid), signal.SIGKILL)
            await vanished(child.pid)
            assert await child.exited == -signal.SIGKILL
            again = await forks.spawn("second", "child_targets:echo", {})
            await again.channel.call("hello", timeout_s=10)

    run(main())


def test_starts_at_the_same_time_share_one_new_fork_server(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            child = await forks.spawn("before", "child_targets:echo", {})
            os.kill(parent_of(child.pid), signal.SIGKILL)
            await asyncio.wait_for(child.exited, 5)
            children = await asyncio.gather(*(forks.spawn(f"c{i}", "child_targets:echo", {}) for i in range(3)))
            assert len({parent_of(child.pid) for child in children}) == 1

    run(main())


def test_a_cancelled_start_leaves_no_process(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            await forks.spawn("warm", "child_targets:echo", {})
            for delay_s in (0.0, 0.0005, 0.002, 0.005):
                starting = asyncio.ensure_future(forks.spawn("gone", "child_targets:echo", {}))
                await asyncio.sleep(delay_s)
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await forks.kill(await starting)
            # The name is free, so nothing of that name lives.
            await forks.kill(await forks.spawn("gone", "child_targets:echo", {}))

    run(main())


def test_a_stranger_on_the_socket_is_hung_up_on(tmp_path):
    async def main():
        async with fork_server(tmp_path) as forks:
            assert forks.folder.stat().st_mode & 0o077 == 0
            stranger = FrameSocket.connect(forks.folder / "parent")
            stranger.send({"hello": "guess"})
            async with asyncio.timeout(10):
                while not stranger.closed:
                    stranger.receive()
                    await asyncio.sleep(0.01)
            assert stranger.closed

    run(main())


def test_no_child_outlives_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from pathlib import Path
            from test_local_processes import fork_server

            async def main():
                async with fork_server(Path({str(tmp_path)!r})) as forks:
                    children = [await forks.spawn(f"c{{i}}", "child_targets:echo", {{}}) for i in range(2)]
                    print(forks.folder, *(child.pid for child in children), flush=True)
                    await asyncio.sleep(60)

            asyncio.run(main())
            """
        )
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        folder, *pids = parent.stdout.readline().split()
        assert all(alive(int(pid)) for pid in pids)
        # A fork server that was stopped cannot see that its parent is gone.
        os.kill(parent_of(int(pids[0])), signal.SIGSTOP)
        parent.kill()
    asyncio.run(vanished(*map(int, pids)))
    for _ in range(200):
        if not Path(folder).exists():
            break
        asyncio.run(asyncio.sleep(0.02))
    assert not Path(folder).exists()


def test_a_long_temporary_folder_does_not_break_the_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    async def main():
        async with fork_server(tmp_path) as forks:
            child = await forks.spawn("one", "child_targets:echo", {})
            assert len(os.fsencode(forks.folder)) < 90
            await child.channel.call("hello", timeout_s=10)

    run(main())
