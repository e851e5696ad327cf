"""Every request is recorded once, with its workers, its end and its times, and the port's answer passes unchanged."""

import asyncio

import pytest

from pearl_executor.ports import Finish, GenerateRequest, GenerateResult, TransferError, WorkerLostError
from pearl_executor.virtual_time import run_virtual
from pearl_rl.rollout.recorded_generation import RecordedGeneration
from pearl_state.roles import Role, Zone
from pearl_state.trajectory import WeightSpan
from pearl_state.worker import GpuId, Worker, WorkerId

RESULT = GenerateResult(
    finish=Finish.STOP,
    tokens=[7, 8],
    logprobs=[-1.0, -1.0],
    spans=(WeightSpan(3, 2),),
    cached_tokens=5,
    queue_s=0.25,
    prefill_s=0.5,
    decode_s=1.0,
    transfer_s=0.125,
)


class Port:
    """Takes two seconds, and answers or fails as it is told."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.aborted = []

    async def generate(self, worker, request, on_chunk):
        return await self._answered()

    async def generate_pair(self, prefill, decode, request, on_chunk):
        return await self._answered()

    async def abort(self, worker, rid):
        self.aborted.append((worker.id, rid))

    async def _answered(self):
        await asyncio.sleep(2.0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def worker(id_, role=Role.COLOCATED):
    return Worker(id=WorkerId(id_), gpus=frozenset({GpuId(id_)}), role=role, zone=Zone.DEDICATED)


def request(rid="t00000001.0002.001"):
    return GenerateRequest(rid=rid, prompt=range(10), max_new_tokens=4, affinity="t00000001", position=0)


def play(answer, *, pair=False, cancel=False):
    async def main():
        records = []
        port = RecordedGeneration(Port(answer), records.append)
        if pair:
            call = port.generate_pair(worker(1, Role.PREFILL), worker(2, Role.DECODE), request(), print)
        else:
            call = port.generate(worker(3), request(), print)
        task = asyncio.ensure_future(call)
        if cancel:
            await asyncio.sleep(1.0)
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        return outcome, records

    return run_virtual(main())


@pytest.mark.parametrize(("pair", "prefill", "decode"), [(False, None, 3), (True, 1, 2)])
def test_an_answer_passes_and_is_recorded_with_its_workers(pair, prefill, decode):
    outcome, (record,) = play(RESULT, pair=pair)
    assert outcome is RESULT
    assert (record.prefill, record.worker, record.finish) == (prefill, decode, "stop")
    assert (record.started_s, record.finished_s) == (0.0, 2.0)
    assert (record.prompt_tokens, record.cached_tokens, record.tokens) == (10, 5, 2)
    assert (record.queue_s, record.prefill_s, record.transfer_s, record.decode_s) == (0.25, 0.5, 0.125, 1.0)


@pytest.mark.parametrize("error", [WorkerLostError("gone", WorkerId(3)), TransferError("no link")])
@pytest.mark.parametrize("pair", [False, True])
def test_a_failure_passes_and_is_recorded_by_its_name(error, pair):
    outcome, (record,) = play(error, pair=pair)
    assert outcome is error
    assert record.finish == type(error).__name__
    assert record.finished_s == 2.0


def test_a_cancelled_call_is_recorded_when_it_was_cancelled():
    outcome, (record,) = play(RESULT, cancel=True)
    assert isinstance(outcome, asyncio.CancelledError)
    assert (record.finish, record.finished_s) == ("CancelledError", 1.0)


def test_an_abort_passes_and_is_no_request():
    async def main():
        records, port = [], Port(RESULT)
        await RecordedGeneration(port, records.append).abort(worker(3), "x")
        return port.aborted, records

    assert run_virtual(main()) == ([(3, "x")], [])
