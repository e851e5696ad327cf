"""After each rollout step: collect what engines measured, refit the makespan models, and tell the Elastic Scheduler."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pearl_executor.ports import WorkerError
from pearl_planner.fit import PlatformFit, StepMeasurement, fit_platform
from pearl_planner.reconcile import current_configuration
from pearl_state.configuration import Configuration
from pearl_state.events import Event, ProfileRefitted
from pearl_state.profile import PlatformProfile
from pearl_state.samples import EngineSamples, TurnSample
from pearl_state.table import WorkerTable
from pearl_state.worker import Worker
from pearl_telemetry.tracker import RuntimeTracker
from pearl_telemetry.window import SampleWindow

_STEPS: Final = 8
"""Steps that T_over is fitted to."""


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
        self._seen: set[Configuration | None] = set()
        self._steps: deque[StepMeasurement] = deque(maxlen=_STEPS)
        self.fit: PlatformFit | None = None
        """The newest fit; None before the first."""

    def observe_turns(self, samples: Sequence[TurnSample]) -> None:
        """Turns of one finished trajectory."""
        self._seen.add(current_configuration(self._table()))
        self._tracker.observe_turns(samples)

    def finish_step(
        self, *, step: int, batch: int, makespan_s: float, decoding_fraction: float | None, borrowed: bool
    ) -> None:
        """A batch is complete: the profile is renewed in the background."""
        self._tracker.finish_step(
            step=step,
            batch=batch,
            makespan_s=makespan_s,
            decoding_fraction=decoding_fraction,
            borrowed=borrowed,
        )
        # Only a step that ran under one configuration throughout says what that one takes.
        if len(self._seen) == 1 and (configuration := self._seen.pop()) is not None:
            self._steps.append(StepMeasurement(configuration=configuration, makespan_s=makespan_s))
        self._seen.clear()
        self._finished.set()

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
        answers = await asyncio.gather(*(self._workers.samples(row) for row in rows), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, EngineSamples):
                self._window.add(answer)
            elif not isinstance(answer, WorkerError):
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
        backed = not {"decode_fixed_s", "prefill_per_token_s"} & self.fit.refused.keys()
        now_s = asyncio.get_running_loop().time()
        self._post(ProfileRefitted(now_s=now_s, workload=workload, platform=self.fit.profile, calibrated=backed))
