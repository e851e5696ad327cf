"""Forecasts inside a simulation: the trace of all trajectories, the predictor on it, and how right it was."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pearl_planner.forecast import PredictorSettings, WindowOutcome, WorkloadPredictor, wape
from pearl_planner.in_step import InStepPolicy
from pearl_planner.policies import Policy
from pearl_rl.control.forecasting import ForecastLoop
from pearl_rl.control.scheduler import ElasticScheduler
from pearl_rl.rollout.lifecycle import LifecycleTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastWindow:
    """One window: what was forecast at its begin, and what it then had; full-prompt tokens."""

    at_s: float
    prefill_forecast: float
    prefill_measured: float
    admitted_forecast: float
    admitted_measured: float


class Forecasting:
    """What a policy that answers forecasts needs beside the control plane. One per run."""

    def __init__(self, settings: PredictorSettings | None = None) -> None:
        self.predictor = WorkloadPredictor(settings or PredictorSettings())
        self.trace = LifecycleTrace()
        self.windows: list[ForecastWindow] = []

    def start(self, scheduler: ElasticScheduler) -> "asyncio.Task[None]":
        """Post forecasts to `scheduler` until the task is cancelled."""
        loop = ForecastLoop(
            self.predictor, state=lambda: scheduler.state, post=scheduler.post, on_window=self._on_window
        )
        self.trace.listeners.append(loop.observe)
        return asyncio.create_task(loop.run(), name="forecasts")

    def _on_window(self, outcome: WindowOutcome) -> None:
        forecast = outcome.forecast
        self.windows.append(
            ForecastWindow(
                at_s=forecast.at_s,
                prefill_forecast=forecast.prefill_tokens,
                prefill_measured=outcome.prefill_tokens,
                admitted_forecast=forecast.admitted_tokens,
                admitted_measured=outcome.admitted_tokens,
            )
        )


def forecasting_for(policy: Policy) -> Forecasting | None:
    """Forecasts for policies that answer them; None for others, which pay nothing for them."""
    return Forecasting() if isinstance(policy, InStepPolicy) else None


def windows_of(forecasts: Forecasting | None) -> tuple[ForecastWindow, ...]:
    """All windows of a run."""
    return () if forecasts is None else tuple(forecasts.windows)


def prefill_wape(windows: Sequence[ForecastWindow]) -> float | None:
    """Error of the prefill forecasts (Prorsa section 5.5); None where nothing was measured."""
    pairs = [(window.prefill_forecast, window.prefill_measured) for window in windows]
    return wape(pairs) if any(measured for _, measured in pairs) else None


def admission_wape(windows: Sequence[ForecastWindow]) -> float | None:
    """Error of the forecasts of decode admissions; None where nothing was measured."""
    pairs = [(window.admitted_forecast, window.admitted_measured) for window in windows]
    return wape(pairs) if any(measured for _, measured in pairs) else None
