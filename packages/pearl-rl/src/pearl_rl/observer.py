"""What a run tells whoever watches it. The run calls; an observer never answers and never raises."""

from dataclasses import dataclass, field
from typing import Protocol

from pearl_state.decision import Decision
from pearl_state.events import Event
from pearl_state.table import WorkerTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One completed training step; one line of `metrics.jsonl`."""

    step: int
    """Counted from 1."""
    steps: int
    """How many the run is to make."""
    now_s: float
    """Seconds on the run's clock."""
    reward_mean: float
    """Mean reward of the trajectories that the step trained on."""
    reward_std: float = 0.0
    trajectories: int = 0
    generated_tokens: int = 0
    """Rollout-generated tokens of these trajectories."""
    trained_tokens: int = 0
    """Tokens that the update saw (prompts included)."""
    duration_s: float = 0.0
    """From the end of the step before to the end of this one, seconds."""
    rollout_s: float = 0.0
    """Makespan of the batch, seconds."""
    training_s: float = 0.0
    predicted_rollout_s: float | None = None
    """What the decision in force predicted for `rollout_s`; None where no single configuration was in force."""
    configuration: str = ""
    """Active configuration when the batch was complete, as text (`2P3D`)."""
    borrowed: bool = False
    """Whether borrowed training GPUs served during the step."""
    staleness_mean: float = 0.0
    """Mean age of the trajectories at use, in weight versions."""
    staleness_max: int = 0
    staleness_in_flight_mean: float = 0.0
    """Part of the mean age that passed between dispatch and completion."""
    staleness_in_queue_mean: float = 0.0
    """Part of the mean age that passed between completion and use."""
    staleness_histogram: dict[int, int] = field(default_factory=dict[int, int])
    """Age in versions → trajectories of that age."""
    wait_grant_s: float = 0.0
    """How long training waited for its GPUs after it asked for them, seconds."""
    wait_bound_s: float = 0.0
    """How long the batch waited for the staleness bound before it began, seconds."""
    lost_trajectories: int = 0
    """Dispatched so far and not accounted for; anything but 0 is a bug."""
    weight_version: int = 0
    """Version that the update produced."""
    loss: float = 0.0
    kl: float = 0.0
    gradient_norm: float = 0.0
    clipped_fraction: float = 0.0
    """Fraction of tokens whose importance weight was truncated or clipped."""


class Observer(Protocol):
    """Watches a run. All calls come from the run's one event loop and must return at once."""

    def on_table(self, table: WorkerTable) -> None:
        """The table changed; `table` is the new version."""
        ...

    def on_decision(self, decision: Decision, trigger: str) -> None:
        """The PD Decision Engine decided; `trigger` names the event that asked for it."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """A training step was completed."""
        ...

    def on_event(self, event: Event) -> None:
        """An event was applied to the table."""
        ...

    def on_message(self, text: str) -> None:
        """Something worth one line to a person."""
        ...


class SilentObserver:
    """Watches and says nothing."""

    def on_table(self, table: WorkerTable) -> None:
        """Ignore."""

    def on_decision(self, decision: Decision, trigger: str) -> None:
        """Ignore."""

    def on_step(self, record: StepRecord) -> None:
        """Ignore."""

    def on_event(self, event: Event) -> None:
        """Ignore."""

    def on_message(self, text: str) -> None:
        """Ignore."""


class Observers:
    """Passes everything on to several observers, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def on_table(self, table: WorkerTable) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_table(table)

    def on_decision(self, decision: Decision, trigger: str) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_decision(decision, trigger)

    def on_step(self, record: StepRecord) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_step(record)

    def on_event(self, event: Event) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_event(event)

    def on_message(self, text: str) -> None:
        """Pass on."""
        for observer in self._observers:
            observer.on_message(text)
