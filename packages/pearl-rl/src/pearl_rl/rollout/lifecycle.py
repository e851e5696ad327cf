"""Traces every trajectory from sampling to reward, as the stream of `PhaseChange` that forecasts are made of.

Router, batch rollout and agents each say what they see; this module puts it in order, so that every listener gets
legal changes only. Engines do not tell when they begin a prompt: per instance the oldest requests that it was given, as
many as it has attention ranks, are taken to be in service, which is the serial view of Prorsa eq. (13) of each rank.
"""

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Any

from pearl_state.phases import LiveTrajectories, PhaseChange, StartupMode, follow_up
from pearl_state.trajectory import GroupId, TrajectoryId, TrajectoryPhase
from pearl_state.worker import WorkerId

Listener = Callable[[PhaseChange], None]
_P = TrajectoryPhase


class LifecycleTrace:
    """One per run. Whoever is not known (`sampled` was never told) is ignored: not all calls belong to a trajectory."""

    def __init__(self, *listeners: Listener, ranks: int = 1) -> None:
        """`ranks`: how many prompts an instance serves side by side."""
        self.listeners: list[Listener] = list(listeners)
        self._ranks = ranks
        self.live = LiveTrajectories()
        self._queues: dict[WorkerId, dict[TrajectoryId, None]] = {}
        """Instance → requests that it was given and whose prompt is not computed, oldest first."""

    # ---- the rollout says -------------------------------------------------------------------------------------------

    def sampled(self, trajectory: TrajectoryId, group: GroupId, task: str = "") -> None:
        """A sample was dispatched. `task` is the kind of its task."""
        self._tell(
            PhaseChange(
                trajectory=trajectory,
                group=group,
                task=task,
                phase=_P.SAMPLED,
                at_s=_now_s(),
                load=self.live.count(_P.SAMPLED),
            )
        )

    def ended(self, trajectory: TrajectoryId, *, accepted: bool | None) -> None:
        """It is over: complete, and whether it may be trained on; or given up (`accepted` is None)."""
        record = self.live.records.get(trajectory)
        if record is None:
            return
        if accepted is None:
            self._dequeue(record)
            self._enter(record, _P.FAILED)
            return
        if record.phase in (_P.SAMPLED, _P.ENVIRONMENT_STARTING, _P.TOOL):
            record = self._rewarding(record)
        self._enter(record, _P.DONE, accepted=accepted)

    # ---- the agent says ---------------------------------------------------------------------------------------------

    def starting(self, trajectory: TrajectoryId, mode: StartupMode) -> None:
        """Its environment starts."""
        record = self.live.records.get(trajectory)
        if record is not None and record.phase is _P.SAMPLED:
            self._enter(record, _P.ENVIRONMENT_STARTING, startup=mode)

    def rewarding(self, trajectory: TrajectoryId) -> None:
        """Its last turn is over; what comes is its reward."""
        record = self.live.records.get(trajectory)
        if record is not None and record.phase in (_P.SAMPLED, _P.ENVIRONMENT_STARTING, _P.TOOL):
            self._rewarding(record)

    def _rewarding(self, record: PhaseChange) -> PhaseChange:
        return self._enter(self._started(record), _P.REWARD)

    def _started(self, record: PhaseChange) -> PhaseChange:
        """Agents need not tell of their environment: then it started with the sample."""
        if record.phase is _P.SAMPLED:
            return self._enter(record, _P.ENVIRONMENT_STARTING, startup=StartupMode.PREWARMED)
        return record

    # ---- the router says --------------------------------------------------------------------------------------------

    def ready(self, trajectory: TrajectoryId, turn: int, prompt_tokens: int) -> None:
        """A request joined the ready queue: a new turn's, or one that is sent again."""
        record = self.live.records.get(trajectory)
        if record is None:
            return
        self._dequeue(record)
        self._enter(self._started(record), _P.READY, turn=turn, prompt_tokens=prompt_tokens)

    def assigned(self, trajectory: TrajectoryId, instance: WorkerId, weights: int | None = None) -> None:
        """`instance` will prefill it, with `weights` of this version as far as is known."""
        record = self.live.records.get(trajectory)
        if record is None or record.phase is not _P.READY:
            return
        queue = self._queues.setdefault(instance, {})
        record = self._enter(record, _P.READY, instance=instance, weights=weights)
        queue[trajectory] = None
        if len(queue) <= self._ranks:
            self._enter(record, _P.PREFILL, instance=instance, weights=weights)

    def admitted(self, trajectory: TrajectoryId, instance: WorkerId) -> None:
        """Its first token came: `instance` decodes it from now on."""
        record = self.live.records.get(trajectory)
        if record is None or record.phase not in (_P.READY, _P.PREFILL):
            return
        if record.phase is _P.READY:
            record = self._enter(record, _P.PREFILL, instance=record.instance, weights=record.weights)
        # The record that decode replaces names the instance that served the prompt.
        self._enter(record, _P.DECODE, instance=instance)
        self._dequeue(record)

    def answered(
        self, trajectory: TrajectoryId, context_tokens: int, instance: WorkerId, prefill_s: float | None = None
    ) -> None:
        """Its response is complete, by `instance`, and goes to the environment. `prefill_s`: as of `PhaseChange`."""
        self.admitted(trajectory, instance)
        record = self.live.records.get(trajectory)
        if record is not None and record.phase is _P.DECODE:
            self._enter(record, _P.TOOL, prompt_tokens=context_tokens, prefill_s=prefill_s)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _dequeue(self, record: PhaseChange) -> None:
        """Take a request out of its instance's queue; the next one there is in service."""
        if record.instance is None or record.phase not in (_P.READY, _P.PREFILL):
            return
        queue = self._queues.get(record.instance, {})
        queue.pop(record.trajectory, None)
        if not queue:
            self._queues.pop(record.instance, None)
            return
        for trajectory in islice(queue, self._ranks):
            head = self.live.records[trajectory]
            if head.phase is _P.READY:
                self._enter(head, _P.PREFILL, instance=record.instance, weights=head.weights)

    def _enter(self, record: PhaseChange, phase: TrajectoryPhase, **changed: Any) -> PhaseChange:
        change = follow_up(record, phase, _now_s(), load=self.live.count(phase), **changed)
        self._tell(change)
        return change

    def _tell(self, change: PhaseChange) -> None:
        self.live.apply(change)
        for listener in self.listeners:
            listener(change)


def task_kind(task_id: str) -> str:
    """`bisect` of `bisect-000017`: tasks of a kind take alike."""
    return task_id.rpartition("-")[0]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
