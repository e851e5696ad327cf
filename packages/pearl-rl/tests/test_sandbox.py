"""The sandbox pool: persistent limited processes, replaced when they fail; what a model wrote stays data."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl_rl.rollout.environments.bisect_environment import BisectArguments, BisectSuite
from pearl_rl.rollout.environments.bisect_game import BisectGame, command
from pearl_rl.rollout.environments.protocol import EnvironmentFailure, EnvironmentSettingsError
from pearl_rl.rollout.environments.sandbox import SandboxLimits, SandboxPool
from pearl_rl.rollout.environments.sandbox_folder import PREFIX, SandboxFolder, sweep
from pearl_rl.rollout.environments.tool_runner import ToolFault, ToolReply

TOOLS = {
    "echo": "def run(argument):\n    return argument\n",
    "fail": "def run(argument):\n    raise ValueError('no such thing')\n",
    "spin": "def run(argument):\n    while True:\n        pass\n",
    "exit": "import os\ndef run(argument):\n    os._exit(3)\n",
    "long": "def run(argument):\n    return 'x' * argument['size']\n",
    "chatter": "import os\ndef run(argument):\n    print('hello')\n    return 'quiet'\n",
    "flood": "import os\ndef run(argument):\n    while True:\n        os.write(1, b'x' * 4096)\n",
    "hoard": "def run(argument):\n    return len(bytearray(argument['size']))\n",
    "pid": "import os\ndef run(argument):\n    return os.getpid()\n",
    "place": "import os, sys\ndef run(argument):\n"
    "    return [os.getcwd(), dict(os.environ), sys.flags.isolated, sys.flags.no_site]\n",
    "write": "def run(argument):\n    open('file', 'w')\n",
    "shell": "import os\ndef run(argument):\n    os.system('true')\n",
    "spawn": "import subprocess\ndef run(argument):\n    subprocess.run(['true'])\n",
    "network": "import socket\ndef run(argument):\n    socket.create_connection(('127.0.0.1', 9))\n",
    "load": "def run(argument):\n    import wave\n",
    "native": "def run(argument):\n    import ctypes\n",
    "shut": "import os, time\ndef run(argument):\n    os.closerange(1, 64)\n    time.sleep(1000)\n",
}
LIMITS = SandboxLimits(call_s=20, memory_bytes=128 * 2**20, output_bytes=4096, start_s=30, free_s=30)


@asynccontextmanager
async def sandbox(folder: Path, processes: int = 1, limits: SandboxLimits = LIMITS) -> AsyncIterator[SandboxPool]:
    files = {}
    for name, source in TOOLS.items():
        files[name] = folder / f"{name}.py"
        files[name].write_text(source)
    pool = SandboxPool(files, processes, limits)
    try:
        yield pool
    finally:
        await pool.close()


def within(folder: Path, body: Callable[[SandboxPool], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with sandbox(folder, **options) as pool:
            return await body(pool)

    return asyncio.run(main())


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts too."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_start_brings_every_process_up_and_calls_reuse_them(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        pids = set(pool.pids)
        assert len(pids) == 3
        replies = await asyncio.gather(*(pool.call("pid", {}) for _ in range(20)))
        assert {reply.value for reply in replies} <= pids
        assert pool.started == 3

    within(tmp_path, body, processes=3)


def test_a_run_takes_at_least_its_latency(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> float:
        await pool.start()
        before_s = asyncio.get_running_loop().time()
        await pool.call("echo", {}, latency_s=0.1)
        return asyncio.get_running_loop().time() - before_s

    assert within(tmp_path, body) >= 0.1


@pytest.mark.parametrize("tool", ["spin", "flood"])
def test_a_run_without_end_is_ended_and_its_process_replaced(tmp_path: Path, tool: str) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        (before,) = pool.pids
        reply = await pool.call(tool, {})
        # A flood breaks the protocol, which loses the process; both end within bounds.
        assert reply.fault is (ToolFault.TIMEOUT if tool == "spin" else ToolFault.LOST)
        assert (await pool.call("echo", {"still": "here"})).value == {"still": "here"}
        assert gone(before)

    within(tmp_path, body, limits=replace(LIMITS, call_s=1.0))


def test_cpu_time_is_bounded_below_wall_time(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> ToolReply:
        return await pool.call("spin", {})

    reply = within(tmp_path, body, limits=SandboxLimits(call_s=60, cpu_s=1))
    assert (reply.fault, reply.detail) == (ToolFault.TIMEOUT, "used more than 1 s of CPU time")


def test_a_lost_process_is_replaced_and_the_call_tried_once_more(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        assert (await pool.call("exit", {})).fault is ToolFault.LOST
        assert pool.started == 2
        assert pool.pids == ()
        assert (await pool.call("echo", {"a": 1})).value == {"a": 1}
        assert pool.started == 3

    within(tmp_path, body)


def test_a_process_killed_while_idle_or_busy_costs_no_call(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        os.kill(pool.pids[0], signal.SIGKILL)
        assert (await pool.call("echo", {"n": 1})).value == {"n": 1}
        busy = asyncio.create_task(pool.call("echo", {"n": 2}, latency_s=0.2))
        await asyncio.sleep(0.05)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert (await busy).value == {"n": 2}

    within(tmp_path, body)


def test_a_pool_whose_processes_were_all_killed_goes_on(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        replies = await asyncio.gather(*(pool.call("echo", {"n": number}) for number in range(9)))
        assert [reply.value["n"] for reply in replies] == list(range(9))

    within(tmp_path, body, processes=3)


def test_a_cancelled_call_never_answers_the_next_one(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        first = asyncio.create_task(pool.call("echo", {"n": 1}, latency_s=5))
        await asyncio.sleep(0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await pool.call("echo", {"n": 2})).value == {"n": 2}

    within(tmp_path, body)


def test_a_call_cancelled_while_its_process_closed_its_output_and_goes_on_leaves_none(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        (before,) = pool.pids
        first = asyncio.create_task(pool.call("shut", {}))
        while pool.pids:  # noqa: ASYNC110 (nobody in this process is told)
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await pool.call("echo", {"n": 2})).value == {"n": 2}
        assert gone(before)

    within(tmp_path, body)


def test_an_exception_of_a_tool_is_an_answer(tmp_path: Path) -> None:
    reply = within(tmp_path, lambda pool: pool.call("fail", {}))
    assert (reply.fault, reply.detail) == (ToolFault.RAISED, "ValueError: no such thing")


def test_output_above_the_limit_is_refused_and_the_process_lives(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        assert (await pool.call("long", {"size": 4000})).value == "x" * 4000
        reply = await pool.call("long", {"size": 5000})
        assert reply.fault is ToolFault.RAISED
        assert "above the limit of 4096" in reply.detail
        assert pool.started == 1

    within(tmp_path, body)


def test_what_a_tool_prints_does_not_disturb_its_answer(tmp_path: Path) -> None:
    assert within(tmp_path, lambda pool: pool.call("chatter", {})).value == "quiet"


def test_memory_is_bounded(tmp_path: Path) -> None:
    reply = within(tmp_path, lambda pool: pool.call("hoard", {"size": 2**30}))
    assert reply.fault is ToolFault.RAISED
    assert reply.detail.startswith("MemoryError")


@pytest.mark.parametrize("tool", ["write", "shell", "spawn", "network", "load", "native"])
def test_files_shells_processes_and_network_are_refused(tmp_path: Path, tool: str) -> None:
    reply = within(tmp_path, lambda pool: pool.call(tool, {}))
    assert reply.fault is ToolFault.RAISED
    assert reply.detail.startswith("PermissionError: the sandbox refuses")


def test_processes_run_isolated_in_an_empty_folder_without_our_environment(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> tuple[list[Any], list[str]]:
        place = (await pool.call("place", {})).value
        return place, os.listdir(place[0])

    (folder, environment, isolated, no_site), entries = within(tmp_path, body)
    assert folder != os.getcwd()
    assert entries == []
    assert "PATH" not in environment
    assert (isolated, no_site) == (1, 1)
    assert not Path(folder).exists()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    texts=st.lists(
        st.text(max_size=60) | st.sampled_from(["; touch pwned", "$(touch pwned)", "`id`", '"}\n{"id": 1}', "\x00\n"]),
        min_size=1,
        max_size=8,
    )
)
def test_any_text_reaches_the_tool_as_it_is(running: tuple[asyncio.Runner, SandboxPool], texts: list[str]) -> None:
    runner, pool = running

    async def body() -> list[ToolReply]:
        return await asyncio.gather(*(pool.call("echo", {"text": text}) for text in texts))

    assert [reply.value["text"] for reply in runner.run(body())] == texts


@pytest.fixture
def running(tmp_path: Path) -> Any:
    with asyncio.Runner() as runner:
        files = {"echo": tmp_path / "echo.py"}
        files["echo"].write_text(TOOLS["echo"])
        pool = SandboxPool(files, 1, SandboxLimits())
        yield runner, pool
        runner.run(pool.close())
    assert not (tmp_path / "pwned").exists()


def test_waiting_for_a_free_process_is_bounded_and_says_what_to_do(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        busy = asyncio.create_task(pool.call("echo", {}, latency_s=0.3))
        await asyncio.sleep(0.01)
        with pytest.raises(EnvironmentFailure, match=r"none of 1 sandbox processes was free.*`processes`"):
            await pool.call("echo", {})
        await busy

    within(tmp_path, body, limits=SandboxLimits(free_s=0.05))


def test_a_tool_that_does_not_load_is_a_failure_of_the_environment(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def run(:")

    async def main() -> None:
        pool = SandboxPool({"broken": broken}, 1)
        try:
            with pytest.raises(EnvironmentFailure, match="did not start: ended"):
                await pool.start()
        finally:
            await pool.close()

    asyncio.run(main())


def test_close_ends_every_process_and_later_calls_fail(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        await pool.start()
        pids = pool.pids
        await pool.close()
        assert all(map(gone, pids))
        with pytest.raises(EnvironmentFailure, match="closed"):
            await pool.call("echo", {})
        await pool.close()

    within(tmp_path, body, processes=2)


ORPHANS = """
import asyncio, os, signal, sys
from pathlib import Path
from pearl_rl.rollout.environments.sandbox import SandboxPool

async def main():
    pool = SandboxPool({"echo": Path(sys.argv[1])}, 2)
    await pool.start()
    print(*pool.pids, flush=True)
    # One that was stopped cannot read the end of its input.
    os.kill(pool.pids[0], signal.SIGSTOP)
    os._exit(1)

asyncio.run(main())
"""


def test_no_process_outlives_a_run_that_died_and_its_folder_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "echo.py").write_text(TOOLS["echo"])
    died = subprocess.run(
        [sys.executable, "-c", ORPHANS, str(tmp_path / "echo.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    pids = [int(pid) for pid in died.stdout.split()]
    assert (died.returncode, len(pids)) == (1, 2)

    async def all_gone() -> None:
        while not all(map(gone, pids)):  # noqa: ASYNC110 (nobody in this process is told)
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(all_gone(), 30))
    (left,) = tmp_path.glob(f"{PREFIX}*")
    SandboxFolder().remove()
    assert not left.exists()


def test_only_folders_of_ours_that_nobody_holds_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = SandboxFolder()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").write_text("")
    (tmp_path / "pearl-sandbox-older").mkdir()
    (tmp_path / f"{PREFIX}left" / "inside").mkdir(parents=True)
    sweep()
    kept = {held.path, target, tmp_path / f"{PREFIX}link", tmp_path / f"{PREFIX}file", tmp_path / "pearl-sandbox-older"}
    assert set(tmp_path.iterdir()) == kept
    held.remove()
    assert not held.path.exists()


def test_a_folder_that_a_sweep_takes_before_it_is_locked_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make, made = tempfile.mkdtemp, []

    def swept_twice(prefix: str) -> str:
        made.append(make(prefix=prefix))
        if len(made) < 3:
            sweep()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_twice)
    folder = SandboxFolder()
    assert (str(folder.path), len(made)) == (made[2], 3)
    assert [path for path in map(Path, made) if path.exists()] == [folder.path]
    folder.remove()


def test_bad_pools_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentSettingsError, match="processes = 0"):
        SandboxPool({}, 0)
    with pytest.raises(EnvironmentSettingsError, match="'gone' has no file"):
        SandboxPool({"gone": tmp_path / "gone.py"})
    with pytest.raises(EnvironmentSettingsError, match="call_s = 0"):
        SandboxLimits(call_s=0)
    with pytest.raises(KeyError, match="it has echo"):
        within(tmp_path, lambda pool: SandboxPool({"echo": tmp_path / "echo.py"}).call("other", {}))


def test_a_hundred_episodes_share_a_few_processes() -> None:
    suite = BisectSuite(BisectArguments(latency_median_s=0.002, processes=4))
    tasks = suite.tasks(seed=1)

    async def play(index: int) -> tuple[float, int]:
        environment, task, steps = suite.environment(), tasks.task(index), 0
        shadow = BisectGame(suite.settings, task)
        await environment.reset(task)
        while True:
            left = shadow.candidates
            action = command(left, left[(len(left) - 1) // 2])
            expected, result = shadow.step(action), await environment.step(action)
            assert result == expected
            steps += 1
            if result.done:
                await environment.close()
                return result.reward, steps

    async def main() -> list[tuple[float, int]]:
        await suite.start()
        try:
            return await asyncio.gather(*map(play, range(100)))
        finally:
            await suite.close()

    played = asyncio.run(main())
    assert all(reward > 0 and steps <= 4 for reward, steps in played)


def test_a_pool_is_prewarmed_while_a_process_is_up_and_free(tmp_path: Path) -> None:
    async def body(pool: SandboxPool) -> None:
        assert not pool.prewarmed
        await pool.start()
        assert pool.prewarmed
        call = asyncio.create_task(pool.call("echo", {}, latency_s=0.2))
        await asyncio.sleep(0.05)
        assert not pool.prewarmed
        await call
        assert pool.prewarmed, "the process is kept for the next call"
        await pool.call("exit", {})
        assert not pool.prewarmed, "its last process is gone: the next start is a cold one"

    within(tmp_path, body)
