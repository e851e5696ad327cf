"""After each rollout step: collect what engines measured, refit the makespan models, and tell the Elastic Scheduler."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from pearl_executor.ports import WorkerError
from pearl_planner.fit import PlatformFit, StepMeasurement, fit_overhead, fit_platform
from pearl_planner.reconcile import current_configuration
from pearl_rl.rollout.ports import Flow
from pearl_state.configuration import Configuration
from pearl_state.events import Event, ProfileRefitted, RolloutBegan
from pearl_state.profile import PlatformProfile
from pearl_state.roles import Mode
from pearl_state.samples import EngineSamples, TurnSample
from pearl_state.table import WorkerTable
from pearl_state.worker import Worker
from pearl_telemetry.tracker import RuntimeTracker
from pearl_telemetry.window import SampleWindow

_STEPS: Final = 8
"""Newest steps of each mode that its cost per turn is fitted to."""

SAMPLES_S: Final = 10.0
"""How long a worker may take to say what it measured; a later answer is void, and the others suffice."""

_MEMORY: Final = 20
"""Steps after which a mode's measured cost per turn is forgotten."""


class StepSegments:
    """The configurations that one step runs under, and for how long. Times are on the run's clock, seconds."""

    def __init__(self) -> None:
        self._configuration: Configuration | None = None
        self._since_s = 0.0
        self._seconds: dict[Configuration, float] = {}

    def begin(self, now_s: float) -> None:
        """A step begins; the configuration in force stays in force."""
        self._seconds.clear()
        self._since_s = now_s

    def in_force(self, configuration: Configuration | None, now_s: float) -> None:
        """From now on this configuration serves; None where none does."""
        if configuration != self._configuration:
            self._close(now_s)
            self._configuration = configuration

    def finish(self, now_s: float) -> tuple[tuple[Configuration, float], ...]:
        """What the step ran under."""
        self._close(now_s)
        return tuple(self._seconds.items())

    def _close(self, now_s: float) -> None:
        if self._configuration is not None:
            elapsed_s = max(0.0, now_s - self._since_s)
            self._seconds[self._configuration] = self._seconds.get(self._configuration, 0.0) + elapsed_s
        self._since_s = now_s


def _pools(segments: Sequence[tuple[Configuration, float]]) -> tuple[bool | None, float]:
    """Whether a step ran under disaggregation throughout, and the chance that a random worker is another one.

    (None, 0) where it ran under both modes.
    """
    modes = {configuration.mode for configuration, _ in segments}
    total_s = sum(seconds for _, seconds in segments)
    if len(modes) != 1 or not total_s:
        return None, 0.0
    chance = sum(seconds * (1.0 - 1.0 / (c.prefill or c.colocated)) for c, seconds in segments) / total_s
    return modes == {Mode.DISAGGREGATION}, chance


class Sampled(Protocol):
    """Whoever can say what a worker's engine measured."""

    async def samples(self, worker: Worker) -> EngineSamples:
        """What was measured since the last call. Raises `WorkerError`."""
        ...


class Refit:
    """The rollout tracker of the pipeline: feeds the Runtime Tracker, and refits when a step is over.

    A worker that leaves in the middle of a step takes its last samples with it; the others suffice.
    """

    def __init__(
        self,
        *,
        workers: Sampled,
        table: Callable[[], WorkerTable],
        post: Callable[[Event], None],
        prior: PlatformProfile,
        weight: float,
    ) -> None:
        self._workers = workers
        self._table = table
        self._post = post
        self._prior = prior
        self._tracker = RuntimeTracker(weight=weight)
        self._window = SampleWindow()
        self._finished = asyncio.Event()
        self._step = StepSegments()
        self._steps: dict[Mode, deque[tuple[int, StepMeasurement]]] = {mode: deque(maxlen=_STEPS) for mode in Mode}
        self._newest = 0
        self.fit: PlatformFit | None = None
        """The newest fit; None before the first."""

    def observe_turns(self, samples: Sequence[TurnSample]) -> None:
        """Turns of one finished trajectory."""
        self._tracker.observe_turns(samples)

    def finish_step(
        self,
        *,
        step: int,
        batch: int,
        makespan_s: float,
        decoding_fraction: float | None,
        borrowed: bool,
        moved_fraction: float | None,
        flow: Flow | None = None,
    ) -> None:
        """A batch is complete: the profile is renewed in the background.

        Where batches overlap, the models are told of the steady state: a batch of all that is in flight, each of a mean
        trajectory's turns, which takes as long as the pool needs for so many turns at the rate of this step.
        """
        segments = self._step.finish(asyncio.get_running_loop().time())
        paired, choice = _pools(segments)
        if flow is not None:
            batch = max(1, round(flow.in_flight))
        self._tracker.finish_step(
            step=step,
            batch=batch,
            makespan_s=makespan_s,
            decoding_fraction=decoding_fraction,
            borrowed=borrowed,
            paired=paired,
            moved=moved_fraction,
            choice=choice,
            steady=flow is not None,
        )
        if flow is not None:
            profile = self._tracker.profile()
            scale = batch * profile.mean_turns / flow.turns if profile is not None and flow.turns else 0.0
            segments = tuple((configuration, seconds * scale) for configuration, seconds in segments)
            makespan_s *= scale
        # A moment in which nobody served, or a transition mixed both modes, cannot be explained by the model.
        if sum(seconds for _, seconds in segments) > 0.9 * makespan_s > 0.0:
            measured = StepMeasurement(segments=segments)
            slowest = self._tracker.slowest if flow is None else None
            if slowest is not None:
                path, visits, environment_s = slowest
                measured = replace(
                    measured, turns=max(1.0, path), slowest_turns=float(visits), environment_s=environment_s
                )
            if measured.mode is not None:
                self._steps[measured.mode].append((step, measured))
        self._newest = step
        self._finished.set()

    def follow(self, event: Event, table: WorkerTable) -> None:
        """The table after an event: notes for how long which configuration is in force."""
        self._step.in_force(current_configuration(table), event.now_s)
        if isinstance(event, RolloutBegan):
            self._step.begin(event.now_s)

    async def run(self) -> None:
        """Refit after each step, until cancelled."""
        while True:
            await self._finished.wait()
            self._finished.clear()
            await self.collect()
            self._publish()

    async def collect(self) -> None:
        """Ask every serving worker for its samples; who does not answer has none."""
        table = self._table()
        rows = [table.rows[id_] for id_ in table.active()]
        questions = (asyncio.wait_for(self._workers.samples(row), SAMPLES_S) for row in rows)
        answers = await asyncio.gather(*questions, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, EngineSamples):
                self._window.add(answer)
            elif not isinstance(answer, WorkerError | TimeoutError):
                raise answer

    def _publish(self) -> None:
        workload = self._tracker.profile()
        if workload is None:
            return
        self.fit = fit_platform(
            decode=self._window.decode,
            prefill=self._window.prefill,
            transfer=self._window.transfer,
            prior=self._prior,
        )
        # Each mode's own newest steps: what one mode costs is remembered while the other runs, but not for ever, since
        # a mode that looked bad once would never be tried again.
        recent = self._newest - _MEMORY
        steps = [measured for kept in self._steps.values() for step, measured in kept if step > recent]
        fitted = fit_overhead(steps, workload=workload, platform=self.fit.profile)
        now_s = asyncio.get_running_loop().time()
        calibrated = self.fit.calibrated
        self._post(ProfileRefitted(now_s=now_s, workload=workload, platform=fitted.profile, calibrated=calibrated))
