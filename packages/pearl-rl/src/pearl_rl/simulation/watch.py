"""Follows the control plane of a simulation: timeline of configurations, decisions, counts, predicted step times."""

from array import array
from collections.abc import Callable

from pearl_executor.calls import Action
from pearl_planner.elastic import ElasticState
from pearl_planner.reconcile import current_configuration
from pearl_rl.control.prediction import StepPrediction
from pearl_rl.observer import StepRecord
from pearl_rl.simulation.archive import Archive
from pearl_rl.simulation.outcome import DecisionRecord, Interval
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision
from pearl_state.effects import Effect, GroupKind, PrepareGroup, RecordDecision, ReleaseTraining
from pearl_state.events import Event, GpusReclaimed, RolloutBegan, TrainingRequested, TrainingResumed
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Mode, Role, Zone
from pearl_state.table import WorkerTable
from pearl_state.trajectory import Trajectory
from pearl_state.worker import Worker, WorkerId


class Watch:
    """`on_step` of the Elastic Scheduler and observer of the pipeline."""

    def __init__(
        self, makespan_s: Callable[[ElasticState, Configuration], float | None], now_s: Callable[[], float]
    ) -> None:
        self.steps: Archive[StepRecord] = Archive()
        self.timeline: Archive[Interval] = Archive()
        self.decisions: Archive[DecisionRecord] = Archive()
        self.expansions = self.reclaims = self.borrows = self.returns = 0
        self.mode_switches = self.ratio_switches = 0
        self.gpu_s = 0.0
        self.followers: list[Callable[[Event, WorkerTable], None]] = []
        """Who else wants to see the table after each event."""
        self.recorders: list[Callable[[Event, ElasticState, tuple[Effect, ...]], None]] = []
        """Who keeps each step of the core."""
        self.on_trajectories: list[Callable[[Trajectory, int], None]] = []
        """Who else wants to see each trajectory, with its step."""
        self.took: dict[str, array[float]] = {}
        """Reconfiguration → how long each took, seconds (PEARL Table 3)."""
        self._starting: dict[WorkerId, int] = {}
        """Worker → its incarnation that has started and loads its first weights."""
        self._releasing_s: float | None = None
        self._returning_s: float | None = None
        self._makespan_s = makespan_s
        self._now_s = now_s
        self._prediction = StepPrediction()
        self._table: WorkerTable | None = None
        self._settled: Configuration | None = None
        self._in_force: Configuration | None = None
        self._awaited: dict[frozenset[WorkerId], GroupKind] = {}
        self._serving_gpus = 0
        self._since_s = 0.0
        self._trajectories, self._lasted_s = 0, 0.0

    @property
    def trajectory_s(self) -> float:
        """Mean time of a trajectory, seconds."""
        return self._lasted_s / self._trajectories if self._trajectories else 0.0

    def on_trajectory(self, trajectory: Trajectory, step: int) -> None:
        """Take a complete trajectory in."""
        self._trajectories += 1
        self._lasted_s += trajectory.finished_s - trajectory.started_s
        for follow in self.on_trajectories:
            follow(trajectory, step)

    def predicted_step_s(self) -> float | None:
        """Predicted makespan of the batch that is just complete, over all configurations it ran under, seconds."""
        return self._prediction.finish(self._now_s())

    # ---- the scheduler ----------------------------------------------------------------------------------------------

    def on_control(self, event: Event, state: ElasticState, effects: tuple[Effect, ...]) -> None:
        """Take one step of the core in."""
        for effect in effects:
            self._emitted(effect)
        if isinstance(event, GpusReclaimed):
            self.reclaims += 1
        elif isinstance(event, TrainingRequested) and any(row.zone is Zone.OVERLAP for row in self._active()):
            self._returning_s = self._now_s()
        elif isinstance(event, TrainingResumed) and event.failed is None:
            self.returns += 1
            if self._returning_s is not None:
                self._took("deactivation", self._now_s() - self._returning_s)
                self._returning_s = None
        if state.table is not self._table:
            self._table = state.table
            self._follow(state)
        self._predict(event, state)
        for follow in self.followers:
            follow(event, state.table)
        for record in self.recorders:
            record(event, state, effects)

    def _emitted(self, effect: Effect) -> None:
        if isinstance(effect, RecordDecision):
            self._decided(effect)
        elif isinstance(effect, ReleaseTraining):
            self._releasing_s = self._now_s()
        elif isinstance(effect, PrepareGroup):
            self._awaited[frozenset(w.id for w in effect.workers)] = effect.kind

    def on_action(self, action: Action) -> None:
        """`on_action` of the executors: what an expansion takes."""
        if action.failed is not None or action.duration_s <= 0 or action.worker is None or self._table is None:
            return
        row = self._table.rows.get(action.worker)
        if row is None or row.zone is not Zone.DEDICATED:
            return
        if action.name == "start":
            self._took("preparation", action.duration_s)
            self._starting[action.worker] = action.incarnation
        elif action.name == "load_weights" and self._starting.get(action.worker) == action.incarnation:
            self._took("finalization", action.duration_s)
            del self._starting[action.worker]

    def _took(self, name: str, seconds: float) -> None:
        self.took.setdefault(name, array("d")).append(seconds)

    def _active(self) -> list[Worker]:
        table = self._table
        return [] if table is None else [table.rows[id_] for id_ in table.active()]

    def _decided(self, effect: RecordDecision) -> None:
        decision = effect.decision
        self.decisions.append(
            DecisionRecord(
                at_s=self._now_s(),
                trigger=effect.trigger,
                selected=str(decision.selected),
                previous=None if decision.previous is None else str(decision.previous),
                reason=str(decision.reason),
                predicted_s=decision.predicted_s,
                borrowed=effect.borrowed,
                gate=effect.gate,
                limits=decision.limits,
            )
        )

    def _follow(self, state: ElasticState) -> None:
        table, now_s = state.table, self._now_s()
        rows = [table.rows[id_] for id_ in table.active()]
        counts = {role: sum(row.role is role for row in rows) for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED)}
        configuration = current_configuration(table)
        interval = Interval(
            at_s=now_s,
            configuration="" if configuration is None else str(configuration),
            prefill=counts[Role.PREFILL],
            decode=counts[Role.DECODE],
            colocated=counts[Role.COLOCATED],
            borrowed=sum(row.zone is Zone.OVERLAP for row in rows),
            rollout_gpus=sum(
                len(row.gpus) for row in table.rows.values() if row.zone is Zone.DEDICATED and row.holds_gpu
            ),
        )
        self.gpu_s += self._serving_gpus * (now_s - self._since_s)
        self._since_s = now_s
        self._serving_gpus = sum(len(row.gpus) for row in rows)
        last = self.timeline[-1] if self.timeline else None
        if last is not None and last.at_s == now_s:
            self.timeline.pop()
        elif last is not None and _same(last, interval):
            interval = last
            self.timeline.pop()
        self.timeline.append(interval)
        self._count_admissions(table)
        self._count_switches(state, configuration)

    def _count_admissions(self, table: WorkerTable) -> None:
        for ids, kind in list(self._awaited.items()):
            states = [table.rows[id_].lifecycle for id_ in ids if id_ in table.rows]
            if states and all(state is Lifecycle.ACTIVE for state in states):
                if kind is GroupKind.BORROW:
                    self.borrows += 1
                    if self._releasing_s is not None:
                        self._took("activation", self._now_s() - self._releasing_s)
                self.expansions += kind is GroupKind.EXPANSION
                del self._awaited[ids]
            elif all(state in (Lifecycle.VACANT, Lifecycle.RELEASED, Lifecycle.RETIRED) for state in states):
                del self._awaited[ids]

    def _count_switches(self, state: ElasticState, settled: Configuration | None) -> None:
        if state.running is not None or settled is None or settled == self._settled:
            return
        before, self._settled = self._settled, settled
        if before is None:
            return
        if before.mode is not settled.mode:
            self.mode_switches += 1
        elif settled.mode is Mode.DISAGGREGATION and before.prefill * settled.decode != settled.prefill * before.decode:
            self.ratio_switches += 1

    def _predict(self, event: Event, state: ElasticState) -> None:
        configuration = current_configuration(state.table)
        if configuration is not None and (configuration != self._in_force or isinstance(event, RolloutBegan)):
            self._in_force = configuration
            self._prediction.in_force(self._makespan_s(state, configuration), self._now_s())
        if isinstance(event, RolloutBegan):
            self._prediction.begin(self._now_s())

    # ---- the pipeline -----------------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        """See `Observer`."""
        self.steps.append(record)

    def on_table(self, table: WorkerTable) -> None:
        """See `Observer`."""

    def on_decision(self, decision: Decision, trigger: str) -> None:
        """See `Observer`."""

    def on_event(self, event: Event) -> None:
        """See `Observer`."""

    def on_message(self, text: str) -> None:
        """See `Observer`."""


def _same(a: Interval, b: Interval) -> bool:
    return (a.configuration, a.prefill, a.decode, a.colocated, a.borrowed, a.rollout_gpus) == (
        b.configuration,
        b.prefill,
        b.decode,
        b.colocated,
        b.borrowed,
        b.rollout_gpus,
    )
