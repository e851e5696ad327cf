"""All-or-nothing preparation of a group of workers: either all are up, or nothing of it is left (PEARL section 4.5)."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pearl_executor.calls import CallError, uninterrupted
from pearl_executor.weight_sync import WeightSync
from pearl_executor.workers import BoundedWorkers
from pearl_state.effects import PrepareGroup
from pearl_state.events import GroupFailed, GroupPrepared
from pearl_state.worker import Worker, WorkerId

T = TypeVar("T")

WEIGHT_ROUNDS = 2
"""How often a prepared group is brought to a version that was published meanwhile. One may be overtaken by the next
version; a publisher that overtakes two is faster than loads are, and admission checks the group once more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How the members of a group are brought up and taken back."""

    workers: BoundedWorkers
    weights: WeightSync
    bring_up: Callable[[Worker], Coroutine[Any, Any, int]]
    """From its row's state to holding weights; returns the version that it reports. Raises `CallError`."""
    roll_back: Callable[[Worker, bool], Coroutine[Any, Any, str | None]]
    """Undo everything; the flag says whether the member is at fault, then its process must go. Never raises.

    Returns the cause where a process that should have been kept had to be ended.
    """


async def prepare_group(effect: PrepareGroup, preparation: Preparation) -> GroupPrepared | GroupFailed:
    """Bring all members up at once. Cancelling this gives the group up: it is cleaned, with nobody at fault.

    On the first failure the other members are given up too. Cleaning cannot be interrupted. Always returns the answer.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reported: dict[WorkerId, int] = {}
    cancelled = False
    try:
        reported, failed = await _bring_all_up(effect.workers, preparation)
    except CallError as error:
        failed = {w.id: str(error) for w in effect.workers}
    except asyncio.CancelledError:
        failed, cancelled = {}, True
    if not failed and not cancelled:
        now_s = loop.time()
        return GroupPrepared(now_s=now_s, plan_id=effect.plan_id, reported=reported, duration_s=now_s - began_s)
    causes = await uninterrupted(_roll_back(effect.workers, preparation, failed))
    return GroupFailed(now_s=loop.time(), plan_id=effect.plan_id, failed={**causes, **failed})


async def _bring_all_up(
    workers: tuple[Worker, ...], preparation: Preparation
) -> tuple[dict[WorkerId, int], dict[WorkerId, str]]:
    """The versions that the members report, or who failed with which cause."""
    weights, limit_s = preparation.weights, preparation.workers.limits.load_s
    reported, failed = await _together({w.id: preparation.bring_up(w) for w in workers})
    for _ in range(WEIGHT_ROUNDS):
        # Training went on while the slowest member started; who was ready early may be behind by now.
        newest = weights.newest_version()
        behind = {w.id: weights.bring(w, newest, limit_s) for w in workers if not failed and reported[w.id] < newest}
        if not behind:
            break
        newer, failed = await _together(behind)
        reported.update(newer)
    if not failed:
        # Whoever was up first may have died since; nothing else would notice it before requests are lost.
        _, failed = await _together({w.id: preparation.workers.probe(w) for w in workers})
    return reported, failed


async def _together(work: Mapping[WorkerId, Coroutine[Any, Any, T]]) -> tuple[dict[WorkerId, T], dict[WorkerId, str]]:
    """Run everybody's work at once until all is done or the first `CallError`, which stops the rest."""
    if not work:
        return {}, {}
    tasks = {id_: asyncio.ensure_future(coroutine) for id_, coroutine in work.items()}
    try:
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
    finally:
        pending = {task for task in tasks.values() if not task.done()}
        for task in pending:
            task.cancel()
        if pending:
            await uninterrupted(asyncio.wait(pending))
    done: dict[WorkerId, T] = {}
    failed: dict[WorkerId, str] = {}
    for id_, task in tasks.items():
        if task.cancelled():
            continue
        error = task.exception()
        if error is None:
            done[id_] = task.result()
        elif isinstance(error, CallError):
            failed[id_] = str(error)
        else:
            raise error
    return done, failed


async def _roll_back(
    workers: tuple[Worker, ...], preparation: Preparation, failed: Mapping[WorkerId, str]
) -> dict[WorkerId, str]:
    """Undo every member at once; the causes of those whose process is lost though it should have been kept."""
    causes = await asyncio.gather(*(preparation.roll_back(w, w.id in failed) for w in workers))
    return {w.id: cause for w, cause in zip(workers, causes, strict=True) if cause is not None}
