"""Compares what the planner predicted with what was measured, for steps in which the configuration changes.

A step rarely runs under one configuration: GPUs come and go in the middle of it. With T(t) the makespan predicted for
the configuration in force at time t, the step's predicted progress is ∫ dt/T(t); the model is exact where a step of
measured length ends with progress 1, and the predicted step time is measured/progress. Where part of a step has no
prediction, as before the first measurements, both are of the rest.
"""

import math
from dataclasses import dataclass
from typing import Final

from pearl_planner.elastic import ElasticState
from pearl_planner.reconcile import workload_of
from pearl_state.configuration import Configuration


def predicted_makespan_s(state: ElasticState, configuration: Configuration) -> float | None:
    """What the planner expects of a step's rollout under `configuration`, seconds.

    None before anything was measured, and where the configuration cannot run. Where batches overlap, that is a batch's
    part of what all trajectories in flight take.
    """
    if not state.calibrated:
        return None
    workload = workload_of(state)
    decision = state.settings.policy.decide(
        workload=workload, platform=state.platform, budget_workers=configuration.workers, pinned=configuration
    )
    if not math.isfinite(decision.predicted_s):
        return None
    return decision.predicted_s * (state.batch / workload.batch if state.continuous else 1.0)


_MOST: Final = 0.5


@dataclass(slots=True)
class StepPrediction:
    """Integrates predicted progress over one step at a time. Times are on the run's clock, seconds."""

    _since_s: float = 0.0
    _predicted_s: float | None = None
    _progress: float = 0.0
    _covered_s: float = 0.0
    _foreseen_s: float = 0.0
    """Part of `_covered_s` for which there was a prediction."""

    def begin(self, now_s: float) -> None:
        """A batch starts; the configuration in force stays in force."""
        self._since_s = now_s
        self._progress = 0.0
        self._covered_s = self._foreseen_s = 0.0

    def in_force(self, predicted_s: float | None, now_s: float) -> None:
        """From now on the configuration in force has this predicted makespan; None where none is predicted."""
        self._advance(now_s)
        self._predicted_s = predicted_s

    def finish(self, now_s: float) -> float | None:
        """The step time that the model predicted, seconds; None where predictions do not cover most of the step."""
        self._advance(now_s)
        if self._progress <= 0 or self._foreseen_s < _MOST * self._covered_s:
            return None
        return self._foreseen_s / self._progress

    def _advance(self, now_s: float) -> None:
        elapsed = now_s - self._since_s
        if self._predicted_s is not None and self._predicted_s > 0:
            self._progress += elapsed / self._predicted_s
            self._foreseen_s += elapsed
        self._covered_s += elapsed
        self._since_s = now_s
