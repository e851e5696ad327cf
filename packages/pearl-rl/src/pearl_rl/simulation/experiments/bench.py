"""Runs the simulations that experiments ask for, each once, on one or several processes."""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from statistics import fmean
from typing import Any, Protocol, TypeVar, cast

from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.simulation.batch_run import RIGID_SLACK, BatchOutcome, run_batch
from pearl_rl.simulation.cluster import SimulatedCluster, simulate
from pearl_rl.simulation.outcome import SimulationResult
from pearl_rl.simulation.scenario import Scenario, scenario_from
from pearl_rl.simulation.workload import Script
from pearl_state.configuration import Configuration

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that begin here do not take Ctrl-C for theirs, which would be a traceback of each."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_on_interrupt() -> None:
    """From here on a process ends of Ctrl-C, without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Job(Protocol[_T_co]):
    """Something to compute. Hashable, and picklable with its result: it may run in another process."""

    def run(self) -> _T_co:
        """Compute it. The same job gives the same result."""
        ...


AnyJob = Job[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """Means over the batches of a `BatchJob`."""

    makespan_s: float
    trajectory_s: float
    prefill_share_time: float
    """Of engine time: from the last decode iteration to the next one, what it takes to change phases included."""
    prefill_share_tokens: float
    """Part of computed tokens that prefill computed."""
    decode_tokens_per_s: float
    """Of one worker between insertions, in iterations with three quarters of an even share of the batch or more."""


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A whole simulation."""

    scenario: Scenario

    def run(self) -> SimulationResult:
        """See `Job`."""
        return simulate(self.scenario)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """`batches` batches of a scenario's workload, each under one configuration; `alone`: each trajectory by itself;
    `bound`: each trajectory on one worker for good, where the parameter set says that ROLL does so.
    """

    scenario: Scenario
    configuration: str
    batches: int
    alone: bool = False
    bound: bool = False

    def run(self) -> BatchSummary:
        """See `Job`."""
        return _batches(self)


@dataclass(frozen=True, slots=True)
class BestRatioJob:
    """A whole simulation at the ratio that is best when batches are replayed; the scenario's policy is `static-pd`."""

    scenario: Scenario
    workers: int
    batches: int

    def run(self) -> SimulationResult:
        """See `Job`."""
        ratios = [f"{prefill}P{self.workers - prefill}D" for prefill in range(1, self.workers)]
        best = min(ratios, key=lambda ratio: BatchJob(self.scenario, ratio, self.batches).run().makespan_s)
        policy = self.scenario.policy.model_copy(update={"configuration": best})
        return simulate(self.scenario.model_copy(update={"policy": policy}))


def run_job(job: AnyJob) -> object:
    """Run one job."""
    return job.run()


class Bench:
    """Results by job, each computed once. `prepare` runs many at once; `result` runs what is missing.

    `parameters` is the parameter set that scenarios take instead of their own; empty: their own.
    """

    def __init__(
        self,
        jobs: int = 1,
        on_done: Callable[[int, int], None] = lambda _done, _of: None,
        *,
        parameters: str = "",
    ) -> None:
        self._processes = jobs
        self._on_done = on_done
        self._parameters = parameters
        self._results: dict[AnyJob, object] = {}

    def prepare(self, jobs: Sequence[AnyJob]) -> None:
        """Run all that are missing."""
        missing = [job for job in dict.fromkeys(jobs) if job not in self._results]
        if self._processes > 1 and len(missing) > 1:
            self._prepare_in_processes(missing)
            return
        for number, job in enumerate(missing, 1):
            self._results[job] = run_job(self._changed(job))
            self._on_done(number, len(missing))

    def _prepare_in_processes(self, missing: Sequence[AnyJob]) -> None:
        spawn = get_context("spawn")
        processes = min(self._processes, len(missing))
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_end_on_interrupt) as pool:
            with _interrupts_ignored():
                outcomes = pool.map(run_job, map(self._changed, missing))
            try:
                for number, (job, outcome) in enumerate(zip(missing, outcomes, strict=True), 1):
                    self._results[job] = outcome
                    self._on_done(number, len(missing))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def result(self, job: Job[_T]) -> _T:
        """The result of any job."""
        if job not in self._results:
            self._results[job] = run_job(self._changed(job))
        return cast("_T", self._results[job])

    def _changed(self, job: AnyJob) -> AnyJob:
        """The job with the chosen parameter set."""
        scenario = getattr(job, "scenario", None)
        if not self._parameters or not isinstance(scenario, Scenario):
            return job
        changed = scenario.model_copy(update={"parameters": self._parameters})
        return cast("AnyJob", replace(cast("Any", job), scenario=changed))

    def cluster(self, scenario: Scenario) -> SimulationResult:
        """The result of a whole simulation."""
        return self.result(ClusterJob(scenario))

    def batches(self, job: BatchJob) -> BatchSummary:
        """The result of batches alone."""
        return self.result(job)


def variant(base: Mapping[str, Mapping[str, object] | str | int], **sections: Mapping[str, object] | str) -> Scenario:
    """A scenario with sections laid over those of `base`."""
    document: dict[str, object] = dict(base)
    for name, values in sections.items():
        before = document.get(name, {})
        document[name] = {**before, **values} if isinstance(values, Mapping) and isinstance(before, Mapping) else values
    return scenario_from(document)


@cache
def _cluster(scenario: Scenario) -> SimulatedCluster:
    return SimulatedCluster(scenario)


def batch_scripts(cluster: SimulatedCluster, batches: int) -> list[list[Script]]:
    """The scripts of the first batches of a scenario, as its pipeline would number them."""
    rollout = cluster.scenario.rollout
    return [
        [
            cluster.workload.script(Task(id=f"{n // rollout.group_size:06d}", seed=0, payload={}), n)
            for n in range(batch * rollout.batch, (batch + 1) * rollout.batch)
        ]
        for batch in range(batches)
    ]


def _batches(job: BatchJob) -> BatchSummary:
    cluster = _cluster(job.scenario)
    configuration = Configuration.parse(job.configuration)
    sets = batch_scripts(cluster, job.batches)
    if job.alone:
        sets = [[script] for scripts in sets for script in scripts]
    model, stable = cluster.worker_model(), cluster.workload.stable_fraction
    rigid = math.inf if job.bound and cluster.parameters.routing.roll_binds else RIGID_SLACK
    outcomes = [run_batch(scripts, configuration, model, stable_fraction=stable, rigid=rigid) for scripts in sets]
    prefill_s, decode_s = sum(o.prefill_s + o.switch_s for o in outcomes), sum(o.decode_s for o in outcomes)
    computed, generated = sum(o.prefill_tokens for o in outcomes), sum(o.generated_tokens for o in outcomes)
    return BatchSummary(
        makespan_s=fmean([o.makespan_s for o in outcomes]),
        trajectory_s=fmean([d for o in outcomes for d in o.durations_s]),
        prefill_share_time=prefill_s / (prefill_s + decode_s),
        prefill_share_tokens=computed / (computed + generated),
        decode_tokens_per_s=_decode_rate(outcomes, len(sets[0]) / configuration.workers),
    )


def _decode_rate(outcomes: Sequence[BatchOutcome], share: float) -> float:
    tokens, seconds = 0, 0.0
    for outcome in outcomes:
        for size, (iterations, took_s) in outcome.decode_by_batch.items():
            if size >= 0.75 * share:
                tokens += size * iterations
                seconds += took_s
    return tokens / seconds if seconds else 0.0
