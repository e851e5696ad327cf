"""The control plane's core under random scripts: every event order, every answer, every failure."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl_planner.catalog import find_profile
from pearl_planner.decide import decide
from pearl_planner.elastic import Borrowing, ElasticSettings, ElasticState, initial_state
from pearl_planner.policies import pearl
from pearl_planner.step import step
from pearl_state import events
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, ScalingReason
from pearl_state.effects import (
    ApplyStage,
    CancelGroup,
    CleanWorkers,
    GrantTraining,
    GroupKind,
    PrepareGroup,
    ReleaseTraining,
    ResumeTraining,
    ReturnGpus,
    SyncWeights,
)
from pearl_state.lifecycle import HOLDS_GPU, Lifecycle
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode, Role, Tenure, Zone
from pearl_state.worker import GpuId, WorkerId

PROFILE = find_profile("swe-32k")
WORKLOAD, PLATFORM = WorkloadProfile(**PROFILE.workload), PlatformProfile(**PROFILE.platform)


def start(borrowing: Borrowing = Borrowing.UNGATED, training: int = 2, tp: int = 1) -> ElasticState:
    return replace(
        initial_state(
            settings=ElasticSettings(policy=pearl(), gpus_per_worker=tp, borrowing=borrowing),
            workload=WORKLOAD,
            platform=PLATFORM,
            training_gpus=training,
        ),
        calibrated=True,
    )


class World:
    """Executors that answer when told to, in any order, well or badly; checks what the core may never do."""

    def __init__(self, state: ElasticState) -> None:
        self.state = state
        self.now = 0.0
        self.pending: list = []
        self.granted = 0
        self.returned: list[frozenset] = []
        self.version = 0
        self.effects: list = []

    def post(self, event) -> None:
        before = self.state
        self.state, effects = step(before, event)
        self.effects = list(effects)
        if isinstance(event, events.WeightsReported):
            # The shortest event of all, whose handler does nothing: all that there is to do was done before.
            idle = events.RolloutProgressed(now_s=event.now_s, step=-1, remaining=0)
            assert step(self.state, idle) == (self.state, ())
        self.check(before)
        for effect in effects:
            match effect:
                case GrantTraining():
                    self.granted += 1
                    rollout = [w for w in self.state.table.rows.values() if w.zone is Zone.OVERLAP]
                    assert not [w for w in rollout if w.role is not Role.TRAINING and w.holds_gpu]
                case ReturnGpus():
                    self.returned.append(effect.gpus)
                    assert not effect.gpus & self.state.table.holders.keys(), "a GPU is returned while held"
                case CancelGroup():
                    for i, (kind, other) in enumerate(self.pending):
                        if kind == "group" and other.plan_id == effect.plan_id:
                            self.pending[i] = ("cancelled", other)
                case PrepareGroup():
                    self.pending.append(("group", effect))
                case ApplyStage() | SyncWeights() | CleanWorkers() | ReleaseTraining() | ResumeTraining():
                    self.pending.append(("other", effect))

    def check(self, before: ElasticState) -> None:
        table = self.state.table
        prefill, decode, _ = table.active_roles
        assert (prefill == 0) == (decode == 0)
        held: dict = {}
        for row in table.rows.values():
            if row.lifecycle in HOLDS_GPU:
                for gpu in row.gpus:
                    assert gpu not in held, f"GPU {gpu} is held by {held[gpu]} and {row.id}"
                    held[gpu] = row.id
            if row.lifecycle is Lifecycle.ACTIVE and row.role is not Role.TRAINING:
                assert row.weight_version is not None
                assert row.weight_version >= table.floor_version
        assert table.target_version >= before.table.target_version

    def answer(self, index: int, fail: bool) -> None:
        kind, effect = self.pending.pop(index % len(self.pending))
        self.now += 1.0
        for event in self.reply(kind, effect, fail):
            self.post(event)

    def reply(self, kind, effect, fail):
        version = self.state.table.target_version
        match effect:
            case PrepareGroup() if kind == "cancelled":
                yield events.GroupFailed(now_s=self.now, plan_id=effect.plan_id)
            case PrepareGroup() if fail:
                yield events.GroupFailed(
                    now_s=self.now, plan_id=effect.plan_id, failed={effect.workers[0].id: "will not start"}
                )
            case PrepareGroup():
                reported = {w.id: version for w in effect.workers}
                yield events.GroupPrepared(now_s=self.now, plan_id=effect.plan_id, reported=reported, duration_s=1.0)
            case ApplyStage():
                named = [w.id for w in (*effect.leave, *effect.admit)]
                failed = {named[0]: "broke"} if fail and named else {}
                yield events.StageApplied(
                    now_s=self.now,
                    plan_id=effect.plan_id,
                    stage=effect.stage,
                    reported={w.id: effect.target_version for w in effect.admit if w.id not in failed},
                    left=frozenset(w.id for w in effect.leave if w.id not in failed),
                    failed=failed,
                    duration_s=0.5,
                )
            case SyncWeights():
                for i, worker in enumerate(effect.workers):
                    if fail and i == 0:
                        yield events.WorkerFailed(
                            now_s=self.now, worker=worker.id, incarnation=worker.incarnation, cause="sync"
                        )
                    else:
                        yield events.WeightsReported(
                            now_s=self.now, worker=worker.id, incarnation=worker.incarnation, version=effect.version
                        )
            case CleanWorkers():
                yield events.WorkersCleaned(now_s=self.now, workers={w.id: w.incarnation for w in effect.workers})
            case ReleaseTraining():
                cause = "kept its memory" if fail else None
                yield events.TrainingReleased(now_s=self.now, plan_id=effect.plan_id, failed=cause)
            case ResumeTraining():
                cause = "no memory" if fail else None
                yield events.TrainingResumed(now_s=self.now, plan_id=effect.plan_id, failed=cause)

    def settle(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.pending:
                return
            self.answer(0, fail=False)
        raise AssertionError(f"never settles: {self.pending}")


def offer(*gpus: int, tenure: Tenure = Tenure.PREEMPTIBLE) -> events.GpusOffered:
    return events.GpusOffered(now_s=0.0, gpus=frozenset(map(GpuId, gpus)), tenure=tenure)


def reclaim(*gpus: int) -> events.GpusReclaimed:
    return events.GpusReclaimed(now_s=0.0, gpus=frozenset(map(GpuId, gpus)), deadline_s=5.0)


def test_offered_gpus_serve_after_one_atomic_admission() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11, tenure=Tenure.RESERVED))
    assert world.state.table.active() == ()
    world.settle()
    assert len(world.state.table.active()) == 2


def test_a_group_is_admitted_at_the_version_published_while_it_started() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11))
    world.answer(0, fail=False)
    world.post(events.WeightsPublished(now_s=1.0, version=3))
    world.settle()
    assert {world.state.table.rows[w].weight_version for w in world.state.table.active()} == {3}
    assert len(world.state.table.active()) == 2


def overtaken() -> World:
    """Two serve version 0, the stage that admits a third has begun, and version 1 comes before its answer."""
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11, tenure=Tenure.RESERVED))
    world.settle()
    world.post(offer(12))
    world.answer(0, fail=False)
    world.post(events.WeightsPublished(now_s=1.0, version=1))
    return world


def test_who_joins_while_weights_are_published_is_admitted_no_staler_than_the_others_and_follows_them() -> None:
    world = overtaken()
    world.answer(0, fail=False)
    joined = world.state.table.rows[WorkerId(4)]
    assert (joined.lifecycle, joined.weight_version) == (Lifecycle.ACTIVE, 0)
    (effect,) = (effect for effect in world.effects if isinstance(effect, SyncWeights))
    assert (effect.workers, effect.version) == ((joined,), 1)
    world.settle()
    assert world.state.table.floor_version == 1


def test_who_joins_with_older_weights_than_others_serve_waits_for_newer_ones() -> None:
    world = overtaken()
    world.answer(1, fail=False)
    assert len(world.state.table.active()) == 2
    assert world.state.table.floor_version == 1
    world.answer(0, fail=False)
    assert len(world.state.table.active()) == 2
    world.settle()
    assert {world.state.table.rows[w].weight_version for w in world.state.table.active()} == {1}
    assert len(world.state.table.active()) == 3


def test_who_has_weights_of_which_the_planner_is_not_told_yet_is_in_no_plan_until_it_is() -> None:
    """Any plan would end without it, at once, and the next one would be the same."""
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11, tenure=Tenure.RESERVED))
    world.settle()
    world.post(offer(12))
    ((_, group),) = world.pending
    world.pending.clear()
    newest = {worker.id: 1 for worker in group.workers}
    world.post(events.GroupPrepared(now_s=1.0, plan_id=group.plan_id, reported=newest, duration_s=1.0))
    assert world.pending == []
    world.post(events.WeightsPublished(now_s=1.0, version=1))
    world.settle()
    assert len(world.state.table.active()) == 3


def test_training_is_granted_only_after_every_borrowed_gpu_came_back() -> None:
    world = World(start())
    world.post(offer(10, 11, tenure=Tenure.RESERVED))
    world.settle()
    world.post(events.RolloutBegan(now_s=1.0, step=1, batch=64))
    world.settle()
    table = world.state.table
    assert len(table.active()) == 4
    assert all(table.rows[w].lifecycle is Lifecycle.RELEASED for w in table.training())
    world.post(events.TrainingRequested(now_s=2.0))
    assert world.granted == 0
    world.settle()
    assert world.granted == 1
    assert len(world.state.table.active()) == 2
    world.post(events.TrainingFinished(now_s=3.0, weight_version=1))
    world.settle()
    assert len(world.state.table.active()) == 4
    assert world.state.table.floor_version == 1


@dataclass(frozen=True)
class Keeping:
    """Disaggregation is best, and colocation is not left for it; `left` where it would be."""

    left: bool
    name: str = "keeping"
    expands: bool = True
    borrows: bool = True

    def decide(self, *, budget_workers: int, current: Configuration | None = None, **asked: Any) -> Decision:
        stays = budget_workers < 3 or not (self.left or current is None)
        best = Configuration(prefill=1, decode=budget_workers - 1)
        chosen = Configuration(colocated=budget_workers) if stays else best
        return decide(**{**asked, "pinned": chosen}, budget_workers=budget_workers, current=current)


@pytest.mark.parametrize("left", [False, True])
def test_who_joins_starts_in_a_role_of_the_mode_that_will_serve(left: bool) -> None:
    """In a role of the other one it would have to start once more before it serves: each borrow would pay for that."""
    world = World(start())
    world.state = replace(world.state, settings=replace(world.state.settings, policy=Keeping(left)))
    world.post(offer(10, 11, tenure=Tenure.RESERVED))
    world.settle()
    assert world.state.table.configuration == Configuration(colocated=2)
    world.post(events.RolloutBegan(now_s=1.0, step=1, batch=64))
    started: set[Role] = set()
    while world.pending:
        groups = (effect for _, effect in world.pending if isinstance(effect, PrepareGroup))
        started.update(worker.role for group in groups for worker in group.workers)
        world.answer(0, fail=False)
    assert world.state.table.configuration.mode is (Mode.DISAGGREGATION if left else Mode.COLOCATION)
    assert started
    assert started <= ({Role.PREFILL, Role.DECODE} if left else {Role.COLOCATED})


def test_a_gate_that_says_no_lends_nothing() -> None:
    world = World(start(Borrowing.GATED))
    costs = replace(world.state.toggle_costs, activation_s=1e6)
    world.state = replace(world.state, toggle_costs=costs)
    world.post(offer(10, 11, tenure=Tenure.RESERVED))
    world.settle()
    world.post(events.RolloutBegan(now_s=1.0, step=1, batch=64))
    world.settle()
    assert len(world.state.table.active()) == 2


def readiness(at_s: float, reason: ScalingReason) -> events.ReadinessMeasured:
    return events.ReadinessMeasured(now_s=at_s, step=1, reason=reason, volume=64, ready=0)


def test_training_that_waits_for_data_lends_against_the_gate_and_data_that_waits_keeps_it_from_lending() -> None:
    dear = World(start(Borrowing.GATED))
    dear.state = replace(dear.state, toggle_costs=replace(dear.state.toggle_costs, activation_s=1e6))
    cheap = World(start(Borrowing.GATED))
    for world, reason, workers in (
        (dear, ScalingReason.GENERATION_DEFICIT, 4),
        (cheap, ScalingReason.CONSUMPTION_DEFICIT, 2),
    ):
        world.post(offer(10, 11, tenure=Tenure.RESERVED))
        world.settle()
        world.post(readiness(1.0, reason))
        world.post(events.RolloutBegan(now_s=2.0, step=1, batch=64))
        world.settle()
        assert len(world.state.table.active()) == workers
    # In balance it is the gate's to say again.
    cheap.post(readiness(3.0, ScalingReason.BALANCED))
    cheap.settle()
    assert len(cheap.state.table.active()) == 4


def test_reclaimed_workers_leave_routing_in_the_same_instant_and_their_gpus_go_back() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11, 12, 13, 14))
    world.settle()
    victim = next(w for w in world.state.table.active() if GpuId(12) in world.state.table.rows[w].gpus)
    world.post(reclaim(12))
    assert victim not in world.state.table.active()
    world.settle()
    assert world.returned == [frozenset({GpuId(12)})]
    assert len(world.state.table.active()) == 4
    assert victim not in world.state.table.rows


def test_losing_the_only_prefill_worker_parks_its_decode_workers_in_the_same_instant() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(*range(10, 15)))
    world.settle()
    table = world.state.table
    assert table.configuration.prefill > 0
    for id_ in table.active(Role.PREFILL):
        row = world.state.table.rows[id_]
        world.post(events.WorkerFailed(now_s=1.0, worker=id_, incarnation=row.incarnation, cause="crash"))
    assert world.state.table.active_roles[:2] == (0, 0)
    world.settle()
    assert len(world.state.table.active()) == 5


def test_a_slot_that_keeps_failing_is_retired_and_the_others_serve() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(10))
    for _ in range(10):
        if not world.pending:
            break
        world.answer(0, fail=True)
    assert world.pending == []
    assert [w.lifecycle for w in world.state.table.rows.values() if w.zone is Zone.DEDICATED] == [Lifecycle.RETIRED]
    world.post(offer(11))
    world.settle()
    assert len(world.state.table.active()) == 1


def test_what_switches_take_is_averaged_into_the_policy_s_costs() -> None:
    """Stages answer after half a second each; the priors are 11, 20 and 5 s."""
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11))
    world.settle()
    admitted = world.state.settings.policy.costs
    assert admitted.new_worker_s == pytest.approx(0.7 * 11.05 + 0.3 * 0.5)
    assert (admitted.relaunch_s, admitted.flip_s) == (20.0, 5.0)
    for pinned in (Configuration(colocated=2), Configuration(1, 1)):
        world.post(events.ConfigurationPinned(now_s=world.now, configuration=pinned))
        world.settle()
    assert world.state.settings.policy.costs.relaunch_s < 20.0
    world.post(offer(12, 13))
    world.settle()
    for pinned in (Configuration(1, 3), Configuration(3, 1)):
        world.post(events.ConfigurationPinned(now_s=world.now, configuration=pinned))
        world.settle()
    assert world.state.settings.policy.costs.flip_s < 5.0


def test_an_answer_of_an_unknown_plan_changes_nothing() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11))
    world.settle()
    before = world.state.table
    world.post(events.StageApplied(now_s=9.0, plan_id=999, stage=0, reported={}))
    world.post(events.GroupPrepared(now_s=9.0, plan_id=999, reported={}))
    world.post(events.GroupFailed(now_s=9.0, plan_id=999))
    assert world.state.table.rows == before.rows


def test_gpus_too_few_for_a_worker_wait_for_more() -> None:
    world = World(start(Borrowing.OFF, tp=2))
    world.post(offer(10))
    world.settle()
    assert not world.state.table.active()
    world.post(offer(11, 12))
    world.settle()
    assert len(world.state.table.active()) == 1
    world.post(reclaim(12))
    assert world.returned == [frozenset({GpuId(12)})]
    world.post(reclaim(11))
    world.settle()
    assert world.returned[-1] == frozenset({GpuId(11)})
    world.post(offer(11))
    world.settle()
    assert len(world.state.table.active()) == 1


def test_a_reclaim_taken_back_keeps_the_slot() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11))
    world.settle()
    world.post(reclaim(10))
    world.post(offer(10))
    world.settle()
    assert len(world.state.table.active()) == 2


ACTION = st.one_of(
    st.tuples(st.just("offer"), st.sets(st.integers(10, 17), min_size=1)),
    st.tuples(st.just("reclaim"), st.sets(st.integers(10, 17), min_size=1)),
    st.tuples(st.just("train"), st.none()),
    st.tuples(st.just("trained"), st.none()),
    st.tuples(st.just("rollout"), st.integers(0, 64)),
    st.tuples(st.just("crash"), st.integers(0, 7)),
    st.tuples(st.just("publish"), st.none()),
    st.tuples(st.just("cordon"), st.tuples(st.integers(0, 7), st.booleans())),
    st.tuples(st.just("answer"), st.tuples(st.integers(0, 50), st.booleans())),
    st.tuples(st.just("answer"), st.tuples(st.integers(0, 50), st.just(False))),
)


def play(world: World, script: list) -> None:
    for name, arg in script:
        world.now += 0.5
        now = world.now
        match name:
            case "offer":
                world.post(events.GpusOffered(now_s=now, gpus=frozenset(map(GpuId, arg))))
            case "reclaim":
                world.post(events.GpusReclaimed(now_s=now, gpus=frozenset(map(GpuId, arg)), deadline_s=now + 2))
            case "train":
                world.post(events.TrainingRequested(now_s=now))
            case "trained":
                if world.state.training_running:
                    world.version = world.state.table.target_version + 1
                    world.post(events.TrainingFinished(now_s=now, weight_version=world.version))
            case "rollout":
                world.post(events.RolloutBegan(now_s=now, step=world.state.step + 1, batch=64))
                world.post(events.RolloutProgressed(now_s=now, step=world.state.step, remaining=arg))
            case "crash":
                row = world.state.table.rows.get(WorkerId(arg))
                if row is not None:
                    world.post(
                        events.WorkerFailed(now_s=now, worker=row.id, incarnation=row.incarnation, cause="crash")
                    )
            case "publish":
                world.post(events.WeightsPublished(now_s=now, version=world.state.table.target_version + 1))
            case "cordon":
                world.post(events.WorkersCordoned(now_s=now, workers=frozenset({WorkerId(arg[0])}), cordoned=arg[1]))
            case "answer":
                if world.pending:
                    world.answer(*arg)


@pytest.mark.parametrize("tp", [1, 2])
@given(script=st.lists(ACTION, max_size=40), most=st.sampled_from([1, 2, 64]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_script_keeps_the_invariants_and_settles_on_what_is_available(tp: int, script: list, most: int) -> None:
    state = start(tp=tp)
    world = World(replace(state, settings=replace(state.settings, expansion_workers=most)))
    play(world, script)
    world.settle()
    state = world.state
    assert not state.groups
    assert not state.removals
    assert state.running is None
    table = state.table
    serving = set(table.active())
    usable = {
        w for w in state.available if not table.rows[w].cordoned and table.rows[w].lifecycle is not Lifecycle.RETIRED
    }
    assert usable <= serving
    assert not state.doomed
    for id_ in serving:
        assert table.rows[id_].weight_version == table.target_version
    if state.training_wanted:
        assert state.training_running
        assert not [w for w in serving if table.rows[w].zone is Zone.OVERLAP]


@given(script=st.lists(ACTION, max_size=30))
@settings(max_examples=30, deadline=None)
def test_the_same_script_gives_the_same_effects(script: list) -> None:
    worlds = [World(start()), World(start())]
    for world in worlds:
        play(world, script)
    assert worlds[0].state == worlds[1].state


def test_a_signal_during_a_plan_is_decided_on_when_the_plan_is_over() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(*range(10, 18)))
    world.answer(0, fail=False)
    assert world.state.running is not None
    slow_prefill = replace(PLATFORM, prefill_per_token_s=60e-6)
    world.post(events.ProfileRefitted(now_s=1.0, workload=WORKLOAD, platform=slow_prefill))
    world.settle()
    best = pearl().decide(workload=WORKLOAD, platform=slow_prefill, budget_workers=8)
    assert world.state.table.configuration == best.selected


def test_a_worker_lost_just_before_its_group_is_ready_is_not_admitted() -> None:
    world = World(start(Borrowing.OFF))
    world.post(offer(10, 11))
    victim = min(w for w in world.state.table.rows if world.state.table.rows[w].zone is Zone.DEDICATED)
    world.post(events.WorkerFailed(now_s=1.0, worker=victim, incarnation=1, cause="crash"))
    world.answer(0, fail=False)
    assert world.state.table.rows[victim].lifecycle is Lifecycle.FAILED
    world.settle()
    assert len(world.state.table.active()) == 2
    assert world.state.table.rows[victim].incarnation == 2


def test_a_borrow_prepares_overlap_workers_only() -> None:
    world = World(start())
    world.post(offer(10, tenure=Tenure.RESERVED))
    world.settle()
    world.post(events.RolloutBegan(now_s=1.0, step=1, batch=64))
    world.answer(0, fail=False)
    groups = [e for kind, e in world.pending if kind == "group"]
    assert [g.kind for g in groups] == [GroupKind.BORROW]
    assert {w.zone for g in groups for w in g.workers} == {Zone.OVERLAP}


def test_the_answer_of_a_stage_does_not_touch_a_slot_that_was_freed_meanwhile() -> None:
    world = World(start(tp=2))
    play(
        world,
        [("offer", {10, 11}), ("answer", (0, False)), ("crash", 3), ("reclaim", {10}), ("answer", (1, False))],
    )
    world.settle()
    assert not world.state.doomed


@pytest.mark.parametrize("min_healthy", [0, 1, 2, 3])
@pytest.mark.parametrize("crashes", [False, True])
def test_however_often_slots_fail_never_fewer_than_min_healthy_are_kept(min_healthy: int, crashes: bool) -> None:
    state = start(Borrowing.OFF)
    world = World(replace(state, settings=replace(state.settings, max_restarts=1, min_healthy=min_healthy)))
    world.post(offer(10, 11, 12))
    for _ in range(60):
        if crashes:
            world.settle()
            for row in list(world.state.table.rows.values()):
                if row.lifecycle is Lifecycle.ACTIVE and row.zone is Zone.DEDICATED:
                    world.post(
                        events.WorkerFailed(now_s=1.0, worker=row.id, incarnation=row.incarnation, cause="crash")
                    )
        elif world.pending:
            world.answer(0, fail=True)
        slots = [row for row in world.state.table.rows.values() if row.zone is Zone.DEDICATED]
        assert sum(row.lifecycle is not Lifecycle.RETIRED for row in slots) >= min_healthy
    assert sum(row.lifecycle is not Lifecycle.RETIRED for row in slots) == min_healthy


def test_a_worker_is_retired_after_its_restarts_but_never_the_last_of_the_healthy_ones() -> None:
    """NeMo-RL#3613: restarts without a cap; here three, then the slot is retired, but not below `min_healthy`."""
    for min_healthy, retired in ((0, True), (1, False)):
        state = start(Borrowing.OFF)
        world = World(replace(state, settings=replace(state.settings, max_restarts=3, min_healthy=min_healthy)))
        world.post(offer(10))
        for _ in range(5):
            if world.pending:
                world.answer(0, fail=True)
        (row,) = [w for w in world.state.table.rows.values() if w.zone is Zone.DEDICATED]
        assert (row.lifecycle is Lifecycle.RETIRED) is retired
        assert row.failures == (4 if retired else 5)
        if not retired:
            world.settle()
            assert world.state.table.active() == (row.id,)
