import asyncio
import contextlib
import math
import socket

import pytest

from pearl_executor import virtual_time
from pearl_executor.virtual_time import SimulationDeadlockError, VirtualTimeError, run_virtual


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_sleeps_pass_at_once_and_in_order() -> None:
    log: list[tuple[float, str]] = []

    async def nap(name: str, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
        log.append((now_s(), name))

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(nap("long", 3600.0))
            group.create_task(nap("short", 0.5))
        return now_s()

    assert run_virtual(main()) == 3600.0
    assert log == [(0.5, "short"), (3600.0, "long")]


def test_timeouts_expire_at_their_virtual_time() -> None:
    async def main() -> float:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(10.0)
        return now_s()

    assert run_virtual(main()) == 5.0


def test_a_hang_is_an_error_that_names_the_task_and_the_line() -> None:
    async def inner() -> None:
        await asyncio.get_running_loop().create_future()

    async def stuck() -> None:
        await inner()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(stuck(), name="worker-3")

    with pytest.raises(SimulationDeadlockError, match=r"worker-3 waits in .*inner \(test_virtual_time.py:\d+\)"):
        run_virtual(main())


def test_spinning_without_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "LIVELOCK_ITERATIONS", 1000)

    async def main() -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(0)

    with pytest.raises(SimulationDeadlockError, match="time stands still at 0"):
        run_virtual(main())


def test_timers_fire_even_where_the_clock_rounds() -> None:
    async def main() -> int:
        fired = 0
        for _ in range(20):
            await asyncio.sleep(2.0**26)
            for fraction in (0.4, 0.9, 1.0, 1.6, 1e6):
                await asyncio.sleep(fraction * math.ulp(now_s()))
                fired += 1
        return fired

    assert run_virtual(main()) == 100


def test_what_would_run_in_a_thread_runs_at_once() -> None:
    def work(value: int) -> int:
        if value < 0:
            raise ValueError("negative")
        return value * 2

    async def main() -> None:
        assert await asyncio.to_thread(work, 4) == 8
        with pytest.raises(ValueError, match="negative"):
            await asyncio.to_thread(work, -1)
        assert now_s() == 0.0

    run_virtual(main())


def test_sockets_are_refused() -> None:
    async def read(end: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(end, print)

    first, second = socket.socketpair()
    with first, second, pytest.raises(VirtualTimeError):
        run_virtual(read(first))


def test_leftover_tasks_are_cancelled() -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("background")

    async def main() -> None:
        task = asyncio.create_task(background())
        await asyncio.sleep(1.0)
        assert not task.done()

    run_virtual(main())
    assert ended == ["background"]


def test_the_result_and_the_error_of_main_come_through() -> None:
    async def fine() -> int:
        return 7

    async def broken() -> None:
        raise KeyError("x")

    assert run_virtual(fine()) == 7
    with pytest.raises(KeyError):
        run_virtual(broken())


def test_alarms_and_timers_of_one_moment_fire_in_the_order_in_which_they_were_set() -> None:
    log: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualTimeLoop)
        loop.alarm(2.0, lambda: log.append("alarm"))
        loop.call_at(2.0, log.append, "timer")
        void = loop.call_at(1.5, log.append, "cancelled")
        loop.alarm(1.0, void.cancel)
        loop.alarm(2.0, lambda: log.append("last"))
        await asyncio.sleep(2.0)
        assert now_s() == 2.0

    run_virtual(main())
    assert log == ["alarm", "timer", "last"]


def test_many_cancelled_timers_are_thrown_away() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualTimeLoop)
        for _ in range(10_000):
            loop.call_later(1e6, print).cancel()
        assert len(loop._timers) < 1000
        await asyncio.sleep(1.0)

    run_virtual(main())
