"""What a run tells the outside: OpenTelemetry traces and metrics, and scalar sinks such as TensorBoard."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from pearl_executor.calls import Action
from pearl_executor.runtimes.local.hosting import EngineRecipe
from pearl_executor.tracing import TRACEPARENT, TracingRecipe
from pearl_rl.control.scheduler import Executor
from pearl_rl.errors import CommandError
from pearl_rl.observer import Observer, Observers, SilentObserver, StepRecord
from pearl_rl.rollout.agent import Agent
from pearl_rl.rollout.recorded_generation import RequestRecord
from pearl_rl.settings.telemetry import TelemetrySettings
from pearl_rl.traced import TracedAgent, TracedExecutor
from pearl_state.effects import Effect
from pearl_state.events import Event
from pearl_state.trajectory import Trajectory
from pearl_telemetry.context import TraceKeys
from pearl_telemetry.instruments import Instruments
from pearl_telemetry.logs import CorrelatedLogs
from pearl_telemetry.sdk import TelemetryError, TelemetryOptions, open_telemetry
from pearl_telemetry.traces import RunTraces

SCALARS: Final[Mapping[str, str]] = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "duration_s": "time/step_s",
    "rollout_s": "time/rollout_s",
    "training_s": "time/training_s",
    "wait_grant_s": "time/wait_grant_s",
    "predicted_rollout_s": "time/rollout_predicted_s",
    "generated_tokens": "tokens/generated",
    "trained_tokens": "tokens/trained",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "lost_trajectories": "trajectories/lost",
    "loss": "train/loss",
    "kl": "train/kl",
    "gradient_norm": "train/gradient_norm",
    "clipped_fraction": "train/clipped_fraction",
    "weight_version": "train/weight_version",
    "borrowed": "cluster/borrowed",
}
"""Field of a step's record → its name in a scalar sink."""


_LOGGERS: Final = ("pearl_executor", "pearl_rl")
"""Whose log records go where spans go."""
_WRITES_SPANS: Final = ("pearl_telemetry.remote", "opentelemetry.sdk.trace.export")


class ScalarSink(Protocol):
    """Takes one step's scalars."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep `values` under their slash names."""
        ...

    def close(self) -> None:
        """Flush and stop."""
        ...


class RunTelemetry(SilentObserver):
    """All of it for one run. An observer; where nothing is set it costs next to nothing."""

    def __init__(self, settings: TelemetrySettings, folder: Path, model: str, now_s: float) -> None:
        options = TelemetryOptions(
            jsonl=folder if settings.jsonl else None,
            otlp_endpoint=settings.otlp_endpoint,
            prometheus_port=settings.prometheus_port,
            prometheus_host=settings.prometheus_host,
            interval_s=settings.interval_s,
            run=folder.name,
        )
        try:
            self._telemetry = open_telemetry(options)
        except TelemetryError as error:
            raise CommandError(f"[telemetry] {error}") from None
        self.instruments = Instruments(self._telemetry.meter_provider, self._telemetry.tracer_provider)
        self._traces: RunTraces | None = None
        self._tracing: TracingRecipe | None = None
        self._keys = TraceKeys(str(folder.absolute()))
        if options.jsonl is not None or options.otlp_endpoint:
            self._traces = RunTraces(
                epoch_s=datetime.now(UTC).timestamp() - now_s,
                model=model,
                tracer_provider=self._telemetry.tracer_provider,
                keys=self._keys,
                ids=self._telemetry.ids,
            )
            kept = "" if options.jsonl is None else str(folder.absolute())
            where = {"jsonl": kept, "otlp_endpoint": options.otlp_endpoint, "run": options.run}
            self._tracing = TracingRecipe(opener="pearl_telemetry.remote:open_worker_spans", settings=where)
        self._logs: logging.Handler | None = None
        if self._telemetry.logger_provider is not None:
            self._logs = CorrelatedLogs(self._telemetry.logger_provider, TRACEPARENT.get)
            for name in _LOGGERS:
                logging.getLogger(name).addHandler(self._logs)
        self._sinks = [_SINKS[name](folder) for name in settings.sinks]

    def observing(self, *others: Observer) -> Observers:
        """The other observers, the instruments, and this."""
        return Observers(*others, self.instruments, self)

    def recipe(self, recipe: EngineRecipe) -> EngineRecipe:
        """The recipe whose workers write spans too, where somebody takes them."""
        if self._tracing is None:
            return recipe
        return replace(recipe, tracing=self._tracing, preload=(*recipe.preload, *_WRITES_SPANS))

    def agent(self, agent: Agent) -> Agent:
        """The agent whose calls carry the context of their turn, where somebody traces."""
        return agent if self._tracing is None else TracedAgent(agent, self._keys)

    def executor(self, executor: Executor) -> Executor:
        """The executor whose calls carry the context of their reconfiguration, where somebody traces."""
        if self._tracing is None or self._traces is None:
            return executor
        return TracedExecutor(executor, self._traces.context)

    def on_step(self, record: StepRecord) -> None:
        """A training step was completed."""
        if self._traces is not None:
            self._traces.on_step(record, record.now_s, record.step)
        if self._sinks:
            figures = asdict(record)
            values = {name: float(figures[key]) for key, name in SCALARS.items() if figures[key] is not None}
            for sink in self._sinks:
                sink.write(record.step, values)

    def on_message(self, text: str) -> None:
        """Something worth a line happened."""
        if self._logs is not None:
            self._logs.emit(logging.LogRecord("pearl_rl.run", logging.INFO, "", 0, text, None, None))

    def on_control(self, event: Event, effects: Iterable[Effect]) -> None:
        """One step of the control plane."""
        if self._traces is not None:
            self._traces.on_control(event, effects)

    def on_trajectory(self, trajectory: Trajectory, step: int) -> None:
        """A trajectory of step `step` came back."""
        if self._traces is not None:
            self._traces.on_trajectory(trajectory, step)

    def requests(self, record: Callable[[RequestRecord], None]) -> Callable[[RequestRecord], None]:
        """Who else is told of finished requests, where somebody traces; else `record` itself."""
        traces = self._traces
        if traces is None:
            return record

        def both(request: RequestRecord) -> None:
            record(request)
            traces.on_request(request.rid, request.worker, request.prefill, request.transfer_s)

        return both

    def on_action(self, action: Action) -> None:
        """A call on a worker ended."""
        self.instruments.on_action(action.name, action.duration_s, action.failed)
        if self._traces is not None:
            self._traces.on_action(action.name, action.worker, action.started_s, action.duration_s, action.failed)

    def close(self) -> None:
        """Flush and stop, within a bounded time."""
        if self._logs is not None:
            for name in _LOGGERS:
                logging.getLogger(name).removeHandler(self._logs)
        self._telemetry.close()
        for sink in self._sinks:
            sink.close()


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._writer = _import("tensorboardX").SummaryWriter(logdir=str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Logged:
    """Sinks with W&B's interface: `init(project, name)`, `log(values, step)`, `finish()`."""

    def __init__(self, module: str, folder: Path) -> None:
        self._run: Any = _import(module)
        self._run.init(project="pearl", name=folder.name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _import(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise CommandError(f"[telemetry] sinks: {module} is not installed; pip install {module}") from None


_SINKS: Final[Mapping[str, Callable[[Path], ScalarSink]]] = {
    "tensorboard": _TensorBoard,
    "wandb": lambda folder: _Logged("wandb", folder),
    "trackio": lambda folder: _Logged("trackio", folder),
}
