"""Watches every step of the core: journals events and decisions, counts what happened, and keeps predictions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pearl_planner.elastic import ElasticState
from pearl_planner.gate import NOBODY_S
from pearl_planner.reconcile import current_configuration
from pearl_rl.control.prediction import StepPrediction
from pearl_rl.control.table_log import TableLog
from pearl_rl.encoding import encode
from pearl_rl.observer import Observer
from pearl_rl.presentation.update_mode import update_mode_line
from pearl_rl.run_folder import RunFolder
from pearl_rl.training.ref_actor_auto import UpdateModeRecord
from pearl_state.configuration import Configuration
from pearl_state.effects import Effect, GroupKind, PrepareGroup, RecordDecision
from pearl_state.events import Event, GpusReclaimed, ProfileRefitted, RolloutBegan, RolloutFinished, TrainingResumed
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Mode, Tenure
from pearl_state.worker import WorkerId


@dataclass(slots=True)
class ElasticCounts:
    """How often what happened."""

    expansions: int = 0
    """Groups admitted on preemptible GPUs."""
    reclaims: int = 0
    borrows: int = 0
    """Groups admitted on training GPUs."""
    returns: int = 0
    """Times that training took lent GPUs back."""
    mode_switches: int = 0
    ratio_switches: int = 0
    """Changes of N_P:N_D within disaggregation."""


class Recorder:
    """`on_step` of the Elastic Scheduler. `makespan_s` predicts a batch under a configuration, None where it cannot."""

    def __init__(
        self,
        folder: RunFolder,
        observer: Observer,
        makespan_s: Callable[[ElasticState, Configuration], float | None],
        now_s: Callable[[], float],
        loads: Callable[[], Mapping[WorkerId, float]] = dict[WorkerId, float],
    ) -> None:
        self.counts = ElasticCounts()
        self._folder = folder
        self._log = TableLog(folder.record_table, loads)
        self._observer = observer
        self._makespan_s = makespan_s
        self._now_s = now_s
        self._prediction = StepPrediction()
        self._awaited: dict[frozenset[WorkerId], GroupKind] = {}
        self._settled: Configuration | None = None
        self._in_force: Configuration | None = None
        self._predicted_s: float | None = None
        self._decision: int | None = None
        self._decided_s = 0.0

    def predicted_step_s(self) -> float | None:
        """Predicted makespan of the batch that is just complete, over all configurations it ran under, seconds."""
        return self._prediction.finish(self._now_s())

    def on_step(self, event: Event, state: ElasticState, effects: tuple[Effect, ...]) -> None:
        """Take one step of the core in."""
        self._folder.record_event(event)
        self._observer.on_event(event)
        self._observer.on_table(state.table)
        self._log.follow(state, self._now_s())
        for effect in effects:
            if isinstance(effect, RecordDecision):
                self._record(effect)
            elif isinstance(effect, PrepareGroup):
                ids = frozenset(w.id for w in effect.workers)
                preemptible = any(w.tenure is Tenure.PREEMPTIBLE for w in effect.workers)
                if effect.kind is GroupKind.BORROW or preemptible:
                    self._awaited[ids] = effect.kind
        self._count(event, state)
        self._predict(event, state)

    def _record(self, effect: RecordDecision) -> None:
        number = self._folder.record_decision(
            effect.decision,
            now_s=self._now_s(),
            trigger=effect.trigger,
            plan=effect.plan,
            borrowed=effect.borrowed,
            gate=effect.gate,
        )
        if effect.gate is None:
            self._decision = number
            self._observer.on_decision(effect.decision, effect.trigger)
        else:
            self._observer.on_message(gate_line(effect.gate))

    def on_update_mode(self, record: UpdateModeRecord) -> None:
        """Take in how reference and actor shared the GPUs in an update."""
        self._folder.record_update_mode(record, now_s=self._now_s())
        self._observer.on_message(update_mode_line(encode(record)))

    def _count(self, event: Event, state: ElasticState) -> None:
        if isinstance(event, GpusReclaimed):
            self.counts.reclaims += 1
        if isinstance(event, TrainingResumed) and event.failed is None:
            self.counts.returns += 1
        self._count_admissions(state)
        self._count_switches(state)

    def _count_admissions(self, state: ElasticState) -> None:
        rows = state.table.rows
        for ids, kind in list(self._awaited.items()):
            present = [rows[id_].lifecycle for id_ in ids if id_ in rows]
            if present and all(lifecycle is Lifecycle.ACTIVE for lifecycle in present):
                if kind is GroupKind.BORROW:
                    self.counts.borrows += 1
                else:
                    self.counts.expansions += 1
                del self._awaited[ids]
            elif all(lifecycle in (Lifecycle.VACANT, Lifecycle.RELEASED, Lifecycle.RETIRED) for lifecycle in present):
                del self._awaited[ids]

    def _count_switches(self, state: ElasticState) -> None:
        settled = current_configuration(state.table) if state.running is None else None
        if settled is None or settled == self._settled:
            return
        if self._settled is not None:
            if settled.mode is not self._settled.mode:
                self.counts.mode_switches += 1
            elif settled.mode is Mode.DISAGGREGATION and (
                settled.prefill * self._settled.decode != settled.decode * self._settled.prefill
            ):
                self.counts.ratio_switches += 1
        self._settled = settled

    def _predict(self, event: Event, state: ElasticState) -> None:
        now_s = self._now_s()
        configuration = current_configuration(state.table)
        anew = isinstance(event, RolloutBegan) or (self._predicted_s is None and isinstance(event, ProfileRefitted))
        if configuration is not None and (configuration != self._in_force or anew):
            self._in_force = configuration
            self._predicted_s = self._makespan_s(state, configuration)
            self._prediction.in_force(self._predicted_s, now_s)
        if isinstance(event, RolloutBegan):
            self._prediction.begin(now_s)
        if isinstance(event, RolloutFinished) and self._decision is not None:
            predicted_s = self._prediction.finish(now_s)
            if predicted_s is not None:
                self._folder.record_measured(
                    self._decision,
                    now_s=now_s,
                    step=event.step,
                    makespan_s=event.makespan_s,
                    predicted_s=predicted_s,
                )


def gate_line(gate: Mapping[str, float]) -> str:
    """The verdict of eq. (7) for people."""
    if gate["dedicated_s"] >= NOBODY_S:
        return "gate      lend training GPUs: no dedicated worker serves yet"
    # Readiness, or a setting, may say other than the sum.
    verdict = "lend" if gate["open"] else "keep"
    benefit, cost = gate["benefit_s"], gate["toggle_s"]
    sign = ">" if benefit > cost else "≤"
    # As many digits as tell the two apart.
    digits = next((n for n in (2, 4) if f"{benefit:.{n}f}" != f"{cost:.{n}f}"), 6)
    return (
        f"gate      {verdict} training GPUs: {gate['remaining']:.0f}/{gate['batch']:.0f} × "
        f"({gate['dedicated_s']:.1f} - {gate['full_s']:.1f}) s = "
        f"{benefit:.{digits}f} s {sign} {cost:.{digits}f} s"
    )
