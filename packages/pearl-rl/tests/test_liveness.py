"""Workers on which requests stand still: who is reported as failed, within which bound."""

import asyncio

from pearl_executor.ports import WorkerLostError
from pearl_executor.virtual_time import run_virtual
from pearl_rl.control.liveness import StallProbe
from pearl_state.roles import Role, Zone
from pearl_state.samples import EngineSamples
from pearl_state.worker import GpuId, Worker, WorkerId

WORKER = Worker(id=WorkerId(3), gpus=frozenset({GpuId(3)}), role=Role.DECODE, zone=Zone.DEDICATED, incarnation=2)


class Workers:
    def __init__(self, *, answers=True, error=None) -> None:
        self.answers, self.error, self.asked = answers, error, 0

    async def samples(self, worker):
        self.asked += 1
        if not self.answers:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        return EngineSamples(role=worker.role)


def judge(workers, *stalls):
    async def main():
        posted = []
        probe = StallProbe(workers, posted.append, probe_s=5.0)
        for count in stalls:
            probe.suspect(WORKER, "t1.0.1: no token for 30 s", count)
        await asyncio.sleep(6.0)
        await probe.aclose()
        return posted

    return run_virtual(main())


def test_a_stopped_process_is_reported_within_the_probe_limit_with_both_causes() -> None:
    (event,) = judge(Workers(answers=False), 1)
    assert (event.worker, event.incarnation, event.now_s) == (3, 2, 5.0)
    assert "no token for 30 s" in event.cause
    assert "did not answer within 5 s" in event.cause


def test_a_process_that_is_gone_is_reported_at_once() -> None:
    (event,) = judge(Workers(error=WorkerLostError("no process")), 1)
    assert event.now_s == 0.0


def test_a_slow_engine_that_answers_is_left_alone_until_it_stalls_again_and_again() -> None:
    assert judge(Workers(), 1) == []
    (event,) = judge(Workers(), 8)
    assert "8 attempts in a row stood still" in event.cause


def test_a_worker_is_asked_once_at_a_time() -> None:
    workers = Workers(answers=False)
    assert len(judge(workers, 1, 2, 3)) == 1
    assert workers.asked == 1
