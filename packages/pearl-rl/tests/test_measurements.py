"""What a run measures of itself: which configuration served for how long, what was foreseen, what happened."""

import asyncio
from dataclasses import replace

import pytest

from pearl_executor.ports import WorkerLostError
from pearl_executor.virtual_time import run_virtual
from pearl_planner.elastic import ElasticSettings, initial_state
from pearl_planner.policies import pearl
from pearl_planner.reconcile import NOBODY_S
from pearl_rl.control.prediction import StepPrediction
from pearl_rl.control.recorder import Recorder, gate_line
from pearl_rl.control.refit import Refit, StepSegments
from pearl_rl.observer import SilentObserver
from pearl_rl.rollout.ports import Flow
from pearl_rl.run_folder import RunFolder, read_decisions
from pearl_rl.settings.load import load_settings
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, Reason
from pearl_state.effects import GroupKind, PrepareGroup, RecordDecision
from pearl_state.events import GpusReclaimed, ProfileRefitted, RolloutBegan, RolloutFinished, TrainingResumed
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Role, Tenure, Zone
from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample, TurnSample
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, Worker, WorkerId

C2, C4, P1D1 = Configuration(colocated=2), Configuration(colocated=4), Configuration(1, 1)
WORKLOAD = WorkloadProfile(batch=4, turns=2, new_prompt_tokens=20, response_tokens=8, turn_environment_s=0.1)
PLATFORM = PlatformProfile(
    decode_fixed_s=0.5,
    decode_per_sequence_s=0.1,
    prefill_per_token_s=0.1,
    kv_bytes_per_token=1024,
    transfer_bytes_per_s=1e8,
)


def table(configuration: Configuration, **options: object) -> WorkerTable:
    """A table whose active workers have this configuration."""
    roles = [role for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED) for _ in range(configuration.count(role))]
    rows = [
        Worker(id=WorkerId(i), gpus=frozenset({GpuId(i)}), role=role, zone=Zone.DEDICATED, **options)  # type: ignore[arg-type]
        for i, role in enumerate(roles)
    ]
    ids = [row.id for row in rows]
    full = WorkerTable().bind(*rows).move(ids, Lifecycle.STARTING).move(ids, Lifecycle.PENDING_WEIGHTS)
    full = full.update([replace(row, weight_version=0) for row in full.rows.values()])
    return full.move(ids, Lifecycle.ACTIVE)


# ---- segments -------------------------------------------------------------------------------------------------------


def test_a_step_is_made_of_the_configurations_in_force_and_their_seconds() -> None:
    step = StepSegments()
    step.in_force(C2, 1.0)
    step.begin(10.0)
    step.in_force(C4, 13.0)
    step.in_force(None, 15.0)
    step.in_force(C2, 16.0)
    assert step.finish(20.0) == ((C2, 7.0), (C4, 2.0))


def test_a_configuration_stays_in_force_from_step_to_step() -> None:
    step = StepSegments()
    step.in_force(C2, 0.0)
    step.begin(5.0)
    step.finish(9.0)
    step.begin(9.5)
    step.in_force(C2, 11.0)
    assert step.finish(12.0) == ((C2, 2.5),)


def test_while_nobody_serves_no_configuration_is_in_force() -> None:
    step = StepSegments()
    step.begin(0.0)
    assert step.finish(3.0) == ()


# ---- predictions ----------------------------------------------------------------------------------------------------


def test_the_predicted_step_time_is_the_measured_one_over_the_progress_foreseen() -> None:
    prediction = StepPrediction()
    prediction.in_force(10.0, 0.0)
    prediction.begin(100.0)
    # Half a batch at 10 s a batch, then the other half at 20 s: as foreseen.
    prediction.in_force(20.0, 105.0)
    assert prediction.finish(115.0) == pytest.approx(15.0)
    # Twice as long as foreseen: progress 2 in what was measured.
    prediction.begin(115.0)
    assert prediction.finish(155.0) == pytest.approx(20.0)


def test_a_step_that_nothing_was_predicted_for_has_no_predicted_time() -> None:
    prediction = StepPrediction()
    prediction.begin(0.0)
    prediction.in_force(None, 1.0)
    assert prediction.finish(5.0) is None
    assert prediction.finish(5.0) is None


def test_time_without_a_prediction_says_nothing_of_the_step() -> None:
    prediction = StepPrediction()
    prediction.begin(0.0)
    # Foreseen for the last tenth only: that is no prediction of the step.
    prediction.in_force(4.0, 9.0)
    assert prediction.finish(10.0) is None
    prediction.in_force(None, 10.0)
    prediction.begin(10.0)
    # 8 of 10 s, in which the whole batch was foreseen to end: they take as long as foreseen.
    prediction.in_force(8.0, 12.0)
    assert prediction.finish(20.0) == pytest.approx(8.0)


# ---- refit ----------------------------------------------------------------------------------------------------------


class Meters:
    """Workers that measured exact lines; the lost ones say nothing."""

    def __init__(self, lost: frozenset[WorkerId] = frozenset()) -> None:
        self.lost = lost

    async def samples(self, worker: Worker) -> EngineSamples:
        await asyncio.sleep(0.01)
        if worker.id in self.lost:
            raise WorkerLostError(worker.id, "gone")
        return EngineSamples(
            role=worker.role,
            decode=tuple(DecodeSample(n, 8, 8 * (0.02 + 0.001 * n)) for n in range(1, 12)),
            prefill=tuple(PrefillSample(n, 0.0005 * n) for n in (16, 32, 64, 128) * 4),
        )


def turns(step: int) -> list[TurnSample]:
    return [
        TurnSample(
            step=step,
            turn=number,
            new_prompt_tokens=20,
            response_tokens=8,
            retained_tokens=0 if number else 8,
            context_tokens=20 + 28 * number,
            prefill_s=0.1,
            decode_s=0.3,
            queue_s=0.0,
            environment_s=0.1,
            last=number == 1,
            cached_tokens=20 * number,
        )
        for number in range(2)
    ]


class Run:
    """A Refit whose steps last as long as they are told."""

    def __init__(self, meters: Meters | None = None) -> None:
        self.table = table(C2)
        self.posted: list[ProfileRefitted] = []
        self.fresh = asyncio.Event()
        self.deserted = False
        self.flow: Flow | None = None
        """Whether nobody serves after the first second of a step."""
        self.refit = Refit(
            workers=meters or Meters(),
            table=lambda: self.table,
            post=self.post,  # type: ignore[arg-type]
            prior=PLATFORM,
            weight=0.3,
        )

    async def step(self, number: int, seconds: float, *, moved: float | None = 0.25) -> ProfileRefitted:
        loop = asyncio.get_running_loop()
        self.refit.follow(RolloutBegan(now_s=loop.time(), step=number, batch=4), self.table)
        if self.deserted:
            await asyncio.sleep(1.0)
            gone = GpusReclaimed(now_s=loop.time(), gpus=frozenset(), deadline_s=0.0)
            self.refit.follow(gone, WorkerTable())
        await asyncio.sleep(seconds)
        for _ in range(4):
            self.refit.observe_turns(turns(number))
        self.refit.finish_step(
            step=number,
            batch=4,
            makespan_s=seconds,
            decoding_fraction=0.5,
            borrowed=False,
            moved_fraction=moved,
            flow=self.flow,
        )
        self.fresh.clear()
        await self.fresh.wait()
        return self.posted[-1]

    def post(self, event: ProfileRefitted) -> None:
        self.posted.append(event)
        self.fresh.set()


def refitted(run: Run, steps: list[tuple[int, float, Configuration]]) -> list[ProfileRefitted]:
    async def main() -> list[ProfileRefitted]:
        task = asyncio.create_task(run.refit.run())
        found = []
        for number, seconds, configuration in steps:
            run.table = table(configuration)
            found.append(await run.step(number, seconds))
        task.cancel()
        return found

    return run_virtual(main())


def test_after_a_step_the_profile_rests_on_telemetry() -> None:
    run = Run(Meters(frozenset({WorkerId(1)})))
    (event,) = refitted(run, [(1, 2.0, C2)])
    assert event.calibrated
    assert event.platform.decode_fixed_s == pytest.approx(0.02)
    assert event.platform.decode_per_sequence_s == pytest.approx(0.001)
    assert event.platform.prefill_per_token_s == pytest.approx(0.0005)
    assert event.workload.bubble_ratio == pytest.approx(1.0)
    # A quarter of the prefixes moved among two workers: half of them would among very many.
    assert event.workload.moved_fraction == pytest.approx(0.5)
    # 28 tokens came before each second turn, 20 were found, and of the 8 others 7 are what moves account for.
    assert event.workload.renewed_fraction == pytest.approx(8 / 28 - 0.25)
    assert run.refit.fit is not None


def test_what_colocated_steps_leave_over_is_forgotten_after_twenty_steps() -> None:
    run = Run()
    slow = [(1, 60.0, C2), (2, 60.0, C2)]
    quick = [(number, 2.0, P1D1) for number in range(3, 24)]
    events = refitted(run, slow + quick)
    at = [0.0, *(event.platform.overhead_per_turn_s for event in events)]
    assert at[1] == 0.0  # one step is no measurement
    assert min(at[2:21]) > 10.0
    # Of the two steps the first is too old; what is left is half of what disaggregated steps leave over.
    assert max(at[21:]) < 1.0
    assert events[-1].workload.pair_moved_fraction == events[-1].workload.moved_fraction


def test_a_step_in_which_nobody_served_for_long_explains_nothing() -> None:
    run = Run()
    steps = [(1, 60.0, C2), (2, 60.0, C2)]
    # With nobody in force after the first second, the same two minutes are no measurement of colocation.
    assert refitted(Run(), steps)[-1].platform.overhead_per_turn_s > 10.0
    run.deserted = True
    assert refitted(run, steps)[-1].platform.overhead_per_turn_s == 0.0


def test_where_batches_overlap_the_models_are_told_of_all_that_is_in_flight_and_of_the_rate_of_turns() -> None:
    steps = [(1, 60.0, C2), (2, 60.0, C2)]
    alone = refitted(Run(), steps)[-1]
    same, busy = Run(), Run()
    # Four trajectories of two turns in flight, whose eight turns end within the step: as a batch of them.
    same.flow = Flow(in_flight=4.0, turns=8)
    # Twice as many in flight, and half as many turns in the same time: each turn takes four times as long.
    busy.flow = Flow(in_flight=8.0, turns=4)
    one, other = refitted(same, steps)[-1], refitted(busy, steps)[-1]
    assert (one.workload.batch, other.workload.batch) == (4, 8)
    assert one.platform.overhead_per_turn_s == pytest.approx(alone.platform.overhead_per_turn_s)
    # A little less than four times as much per turn: it stalls the others on its worker too, of whom there are more.
    assert 3.0 < other.platform.overhead_per_turn_s / one.platform.overhead_per_turn_s < 4.0


# ---- recorder -------------------------------------------------------------------------------------------------------

DECISION = Decision(
    selected=C2, previous=None, reason=Reason.INITIAL, budget_workers=2, candidates=(), considered=1, predicted_s=4.0
)


class Recording:
    """A Recorder over a run folder, with a clock of its own."""

    def __init__(self, folder: RunFolder) -> None:
        self.now_s = 0.0
        self.messages: list[str] = []
        self.folder = folder
        observer = SilentObserver()
        observer.on_message = self.messages.append  # type: ignore[method-assign]
        self.recorder = Recorder(folder, observer, lambda _state, c: 2.0 * c.workers, lambda: self.now_s)
        self.state = initial_state(
            settings=ElasticSettings(policy=pearl()), workload=WORKLOAD, platform=PLATFORM, training_gpus=0
        )

    def see(self, event: object, now: WorkerTable | None = None, *effects: object) -> None:
        self.now_s = event.now_s  # type: ignore[attr-defined]
        if now is not None:
            self.state = replace(self.state, table=now)
        self.recorder.on_step(event, self.state, effects)  # type: ignore[arg-type]


@pytest.fixture
def recording(tmp_path):
    with RunFolder.create(load_settings(), tmp_path / "run") as folder:
        yield Recording(folder)


def test_a_decision_is_kept_with_the_step_that_it_foresaw(recording, tmp_path) -> None:
    began = RolloutBegan(now_s=10.0, step=1, batch=4)
    recording.see(began, table(C2), RecordDecision(decision=DECISION, trigger="RolloutBegan"))
    recording.see(GpusReclaimed(now_s=12.0, gpus=frozenset(), deadline_s=20.0), table(C4))
    # Half of a batch at 4 s each, then half of one at 8 s: as foreseen.
    recording.see(RolloutFinished(now_s=16.0, step=1, makespan_s=6.0))
    assert recording.recorder.predicted_step_s() == pytest.approx(6.0)
    (line,) = read_decisions(tmp_path / "run" / "decisions.jsonl")
    assert line["decision"]["selected"] == "2C"
    (measured,) = line["measured"]
    assert (measured["step"], measured["measured_s"]) == (1, 6.0)
    assert measured["predicted_s"] == pytest.approx(6.0)


def test_switches_are_counted_between_settled_configurations(recording) -> None:
    reclaimed = GpusReclaimed(now_s=1.0, gpus=frozenset(), deadline_s=2.0)
    for configuration in (C2, C4, P1D1, Configuration(2, 2), Configuration(1, 3), Configuration(1, 3), C2):
        recording.see(reclaimed, table(configuration))
    counts = recording.recorder.counts
    # 2C → 4C is no switch, 1P1D → 2P2D keeps the ratio.
    assert (counts.mode_switches, counts.ratio_switches, counts.reclaims) == (2, 1, 7)


def test_groups_count_when_all_their_workers_serve_and_never_when_they_are_gone(recording) -> None:
    full = table(C4, tenure=Tenure.PREEMPTIBLE)
    workers = tuple(full.rows.values())

    def prepare(kind: GroupKind, *chosen: Worker) -> PrepareGroup:
        return PrepareGroup(plan_id=PlanId(1), kind=kind, workers=chosen)

    resumed = TrainingResumed(now_s=1.0)
    fresh = WorkerTable().bind(*[replace(w, lifecycle=Lifecycle.VACANT, weight_version=None) for w in workers[:2]])
    fresh = fresh.move([w.id for w in workers[:2]], Lifecycle.STARTING)
    recording.see(resumed, fresh, prepare(GroupKind.EXPANSION, *workers[:2]))
    assert recording.recorder.counts.expansions == 0
    recording.see(resumed, full, prepare(GroupKind.BORROW, workers[2]))
    counts = recording.recorder.counts
    assert (counts.expansions, counts.borrows, counts.returns) == (1, 1, 2)
    recording.see(replace(resumed, failed="out of memory"), full)
    assert counts.returns == 2


def test_a_gate_s_verdict_is_a_line_for_people() -> None:
    terms = {"dedicated_s": 6.0, "full_s": 4.0, "benefit_s": 1.0, "toggle_s": 0.5, "remaining": 32.0, "batch": 64.0}
    lend = {**terms, "open": 1.0}
    assert gate_line(lend) == "gate      lend training GPUs: 32/64 × (6.0 - 4.0) s = 1.00 s > 0.50 s"
    assert "keep training GPUs" in gate_line({**terms, "open": 0.0, "benefit_s": 0.4})
    # What readiness, or a setting, says against the sum counts.
    assert gate_line({**lend, "benefit_s": 0.4}).startswith("gate      lend training GPUs: 32/64")
    assert "no dedicated worker" in gate_line({**lend, "dedicated_s": NOBODY_S})
