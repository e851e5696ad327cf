"""Every S seconds of a running rollout: forecast the next S seconds, and tell the Elastic Scheduler.

Nothing is forecast while no trajectory lives, nor while none changes its phase for long: then nothing is known that was
not known before, and a rollout that hangs shall not look busy.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from pearl_planner.elastic import ElasticState
from pearl_planner.forecast import Forecast, ForecastError, PredictorSettings, WindowOutcome, WorkloadPredictor
from pearl_planner.in_step import InStepPolicy
from pearl_planner.policies import Policy
from pearl_rl.control.scheduler import ElasticScheduler
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_state.events import Event, LoadForecast
from pearl_state.phases import PhaseChange
from pearl_state.roles import Role
from pearl_state.worker import WorkerId

_STILL_WINDOWS: Final = 360
"""Windows in a row without a change of phase after which forecasts pause until the next one."""


class ForecastLoop:
    """Feeds `predictor` (`observe` listens to the lifecycle trace) and posts `LoadForecast`."""

    def __init__(
        self,
        predictor: WorkloadPredictor,
        *,
        state: Callable[[], ElasticState],
        post: Callable[[Event], None],
        on_window: Callable[[WindowOutcome], None] = lambda _outcome: None,
    ) -> None:
        """`on_window` gets each forecast beside what its window then had."""
        self._predictor = predictor
        self._state = state
        self._post = post
        self._on_window = on_window
        self._changed = asyncio.Event()

    def observe(self, change: PhaseChange) -> None:
        """A listener of the lifecycle trace."""
        self._predictor.observe(change)
        self._changed.set()

    async def run(self) -> None:
        """Forecast until cancelled."""
        still = 0
        while True:
            if not len(self._predictor.live) or still >= _STILL_WINDOWS:
                self._changed.clear()
                await self._changed.wait()
                # Whoever was dispatched in this instant comes first.
                await asyncio.sleep(0.0)
                still = 0
            self._changed.clear()
            self._tick(asyncio.get_running_loop().time())
            await asyncio.sleep(self._predictor.settings.horizon_s)
            still = 0 if self._changed.is_set() else still + 1

    def _tick(self, now_s: float) -> None:
        state, predictor = self._state(), self._predictor
        before = predictor.last
        forecast = predictor.forecast(
            now_s,
            prefill=prefill_instances(state),
            profiled_tokens_per_s=1.0 / state.platform.prefill_per_token_s,
            kv_bytes_per_token=state.platform.kv_bytes_per_token,
        )
        if predictor.last is not None and predictor.last is not before:
            self._on_window(predictor.last)
        self._post(load_forecast(forecast, live=len(predictor.live)))


def prefill_instances(state: ElasticState) -> list[WorkerId]:
    """Who prefills now: prefill workers, and colocated ones."""
    rows = state.table.rows
    return [id_ for id_ in state.table.active() if rows[id_].role is not Role.DECODE]


def load_forecast(forecast: Forecast, *, live: int) -> LoadForecast:
    """A forecast as the event that the core takes."""
    return LoadForecast(
        now_s=forecast.at_s,
        horizon_s=forecast.horizon_s,
        prefill_tokens=forecast.prefill_tokens,
        admitted_tokens=forecast.admitted_tokens,
        decode_kv_bytes=forecast.decode_kv_bytes + forecast.admitted_kv_bytes,
        prefill_tokens_per_s=forecast.tokens_per_s,
        backlog_tokens=forecast.sources.ready + forecast.sources.inflight,
        resident_kv_bytes=forecast.decode_kv_bytes,
        live=live,
        arriving_tokens_per_s=forecast.arriving_tokens_per_s,
    )


class Forecasting:
    """What a policy that answers forecasts needs beside the control plane. One per run."""

    def __init__(self, settings: PredictorSettings | None = None) -> None:
        settings = settings or PredictorSettings()
        self.predictor = WorkloadPredictor(settings)
        self.trace = LifecycleTrace(ranks=settings.ranks)
        self.prefill_error = ForecastError()
        self.admission_error = ForecastError()

    def start(self, scheduler: ElasticScheduler) -> "asyncio.Task[None]":
        """Post forecasts to `scheduler` until the task is cancelled."""
        loop = ForecastLoop(
            self.predictor, state=lambda: scheduler.state, post=scheduler.post, on_window=self._on_window
        )
        self.trace.listeners.append(loop.observe)
        return asyncio.create_task(loop.run(), name="forecasts")

    def _on_window(self, outcome: WindowOutcome) -> None:
        forecast = outcome.forecast
        self.prefill_error.add(forecast.prefill_tokens, outcome.prefill_tokens)
        self.admission_error.add(forecast.admitted_tokens, outcome.admitted_tokens)


def forecasting_for(policy: Policy, horizon_s: float = 10.0, ranks: int = 1) -> Forecasting | None:
    """Forecasts for policies that answer them, of instances with so many attention ranks; None for others, which pay
    nothing for them.
    """
    settings = PredictorSettings(horizon_s=horizon_s, ranks=ranks)
    return Forecasting(settings) if isinstance(policy, InStepPolicy) else None
