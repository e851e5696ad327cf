"""Role switching inside a step, through the pure core: what a forecast may and may not do."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.allocate import target_configuration
from pearl_planner.elastic import Borrowing, ElasticSettings, ElasticState, initial_state
from pearl_planner.in_step import SETTLED, InStepPolicy, demand_of, pearl_prorsa, prorsa
from pearl_planner.policies import Recalling, pearl
from pearl_planner.step import step
from pearl_planner.switching import SwitchCosts
from pearl_state import events
from pearl_state.configuration import Configuration
from pearl_state.decision import Reason, SwitchKind
from pearl_state.effects import ApplyStage, Effect, GroupKind, PrepareGroup, RecordDecision
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode, Role
from pearl_state.worker import GpuId, WorkerId

WORKLOAD = WorkloadProfile(
    batch=64, turns=16, new_prompt_tokens=1700, response_tokens=70, bubble_ratio=0.5, environment_s=60
)
MEASURED = replace(WORKLOAD, context_tokens=1_000.0)
PLATFORM = PlatformProfile(
    decode_fixed_s=0.0065,
    decode_per_sequence_s=0.00036,
    prefill_per_token_s=20e-6,
    kv_bytes_per_token=100_000,
    transfer_bytes_per_s=80e9,
    overhead_per_turn_s=0.5,
    kv_capacity_bytes=100e9,
)
SINGLE_TURN = replace(WORKLOAD, turns=1, new_prompt_tokens=200, response_tokens=8000, environment_s=0.1, bubble_ratio=0)


def even(*, persistence_s: float = 30.0) -> InStepPolicy:
    """Prorsa that begins with as many prefill as decode workers."""
    return prorsa(persistence_s=persistence_s, first=Configuration(1, 1))


EFFICIENT_BYTES = 2 * 6.5 / 0.36 * 1700 * 100_000
"""KV of an efficient batch of sequences, before a context was measured."""


def load(prefill: float, decode: float, now_s: float = 100.0, live: int = 64) -> events.LoadForecast:
    """Demands in instances (a and b of eq. 1)."""
    return events.LoadForecast(
        now_s=now_s,
        horizon_s=10.0,
        prefill_tokens=prefill * 10.0 * 50_000.0,
        admitted_tokens=0.0,
        decode_kv_bytes=decode * EFFICIENT_BYTES,
        prefill_tokens_per_s=50_000.0,
        live=live,
    )


def forecasts(
    state: ElasticState, prefill: float, decode: float, loads: dict[WorkerId, float] | None = None
) -> tuple[ElasticState, tuple[Effect, ...]]:
    """As many windows with this demand as a configuration needs to settle: those before the last change nothing."""
    for i in range(SETTLED - 1):
        state, none = step(state, load(prefill, decode, 100.0 + 10.0 * i), loads or {})
        assert none == ()
    return step(state, load(prefill, decode, 160.0), loads or {})


def settle(state: ElasticState, effects: tuple[Effect, ...], now_s: float) -> tuple[ElasticState, list[Effect]]:
    """Answer everything well until nothing is under way."""
    seen, waiting = list(effects), list(effects)
    while waiting:
        match waiting.pop(0):
            case PrepareGroup() as group:
                reported = {worker.id: state.table.target_version for worker in group.workers}
                event: events.Event = events.GroupPrepared(now_s=now_s, plan_id=group.plan_id, reported=reported)
            case ApplyStage() as stage:
                event = events.StageApplied(
                    now_s=now_s,
                    plan_id=stage.plan_id,
                    stage=stage.stage,
                    reported={worker.id: state.table.target_version for worker in stage.admit},
                    left=frozenset(worker.id for worker in stage.leave),
                )
            case _:
                continue
        state, more = step(state, event)
        seen += more
        waiting += more
    return state, seen


def running(policy: InStepPolicy, workers: int = 8, workload: WorkloadProfile = WORKLOAD) -> ElasticState:
    state = initial_state(
        settings=ElasticSettings(policy=policy, borrowing=Borrowing.OFF),
        workload=workload,
        platform=PLATFORM,
        training_gpus=1,
    )
    state, effects = step(
        replace(state, calibrated=True, batch=64, remaining=64),
        events.GpusOffered(now_s=0.0, gpus=frozenset(GpuId(10 + i) for i in range(workers))),
    )
    return settle(state, effects, 1.0)[0]


def test_prorsa_starts_disaggregated_and_moves_with_the_forecast() -> None:
    state = running(even())
    assert state.table.configuration == Configuration(4, 4)
    state, effects = forecasts(state, 0.5, 2.0)
    record = next(effect for effect in effects if isinstance(effect, RecordDecision))
    # a = 0.5, b = 2: (2, 6) bears min(4, 3) - 1 = 2, no other pair of eight more.
    assert (record.decision.selected, record.decision.reason) == (Configuration(2, 6), Reason.FORECAST)
    state, _ = settle(state, effects, 106.0)
    assert state.table.configuration == Configuration(2, 6)
    assert state.running is None


def test_the_least_loaded_worker_is_the_one_that_changes_its_role() -> None:
    state = running(even())
    prefill = [id_ for id_ in state.table.active() if state.table.rows[id_].role is Role.PREFILL]
    loads = {id_: 5.0 + i for i, id_ in enumerate(prefill)} | {prefill[2]: 1.0}
    state, effects = forecasts(state, 1.6, 2.8, loads)
    stage = next(effect for effect in effects if isinstance(effect, ApplyStage))
    assert dict(stage.switch) == {prefill[2]: Role.DECODE}
    assert prefill[2] not in state.table.active(), "it leaves routing before anything else happens"


def test_one_plan_at_a_time_and_the_next_forecast_finds_it_done() -> None:
    state, effects = forecasts(running(even()), 0.5, 2.0)
    for i in range(SETTLED):
        state, none = step(state, load(3.0, 0.5, 170.0 + 10.0 * i))
        assert none == ()
    state, _ = settle(state, effects, 232.0)
    state, effects = step(state, load(3.0, 0.5, 240.0))
    assert settle(state, effects, 121.0)[0].table.configuration == Configuration(6, 2)


def test_a_switch_that_does_not_pay_is_not_made() -> None:
    short = prorsa(SwitchCosts(flip_s=60.0), persistence_s=1.0, first=Configuration(1, 1))
    state, effects = forecasts(running(short), 1.6, 2.8)
    assert effects == ()
    assert state.table.configuration == Configuration(4, 4)


def test_what_a_reclaim_left_of_the_ratio_stands_until_the_next_forecast() -> None:
    state, effects = forecasts(running(even(persistence_s=60.0)), 0.5, 2.0)
    state, _ = settle(state, effects, 106.0)
    gone = [id_ for id_ in state.table.active() if state.table.rows[id_].role is Role.DECODE][:4]
    gpus = frozenset(gpu for id_ in gone for gpu in state.table.rows[id_].gpus)
    state, effects = step(state, events.GpusReclaimed(now_s=200.0, gpus=gpus, deadline_s=230.0))
    state, _ = settle(state, effects, 201.0)
    assert state.table.configuration == Configuration(2, 2)
    state, effects = forecasts(state, 0.5, 2.0)
    assert settle(state, effects, 211.0)[0].table.configuration == Configuration(1, 3)


def test_what_was_forecast_before_a_plan_does_not_count_after_it_whoever_began_it() -> None:
    state = running(even(persistence_s=60.0))
    for i in range(SETTLED - 1):
        state, _ = step(state, load(0.5, 2.0, 100.0 + 10.0 * i))
    assert len(state.forecasts) == SETTLED - 1
    pinned, effects = step(state, events.ConfigurationPinned(now_s=155.0, configuration=Configuration(5, 3)))
    assert any(isinstance(effect, ApplyStage) for effect in effects)
    assert pinned.forecasts == ()
    state, _ = settle(pinned, effects, 156.0)
    state, _ = step(state, events.ConfigurationPinned(now_s=157.0, configuration=None))
    assert step(state, load(0.5, 2.0, 160.0))[1] == (), "one forecast is not enough"


def test_what_switches_were_learned_to_cost_is_recalled_by_a_policy_that_answers_forecasts() -> None:
    learned = even().observing(SwitchKind.FLIP, 9.0)
    assert learned.costs != even().costs
    assert even().recalling(learned.costs) == learned
    assert isinstance(learned, Recalling)


def test_the_composition_colocates_where_disaggregation_does_not_pay_and_stays_there() -> None:
    state = running(pearl_prorsa(), workload=SINGLE_TURN)
    assert state.table.configuration.mode is Mode.COLOCATION
    state, effects = forecasts(state, 2.0, 1.0)
    assert effects == ()
    # Prorsa alone has no such choice.
    assert running(prorsa(), workload=SINGLE_TURN).table.configuration.mode is Mode.DISAGGREGATION


def test_the_composition_takes_mode_and_budget_from_pearl() -> None:
    for workers in (1, 2, 5, 8, 13):
        chosen = pearl_prorsa().decide(workload=WORKLOAD, platform=PLATFORM, budget_workers=workers)
        assert chosen.selected == pearl().decide(workload=WORKLOAD, platform=PLATFORM, budget_workers=workers).selected
    assert pearl_prorsa().borrows
    assert not prorsa().borrows


def test_other_policies_do_not_answer_forecasts() -> None:
    state = running(even())
    state = replace(state, settings=replace(state.settings, policy=pearl()))
    assert forecasts(state, 0.5, 2.0)[1] == ()


def test_a_person_who_pinned_the_configuration_is_not_overruled() -> None:
    state, effects = step(running(even()), events.ConfigurationPinned(now_s=50.0, configuration=Configuration(3, 5)))
    state, _ = settle(state, effects, 51.0)
    assert state.table.configuration == Configuration(3, 5)
    assert forecasts(state, 0.5, 2.0)[1] == ()


def test_without_a_known_kv_capacity_a_forecast_says_nothing() -> None:
    state = running(even())
    assert forecasts(replace(state, platform=replace(PLATFORM, kv_capacity_bytes=0.0)), 0.5, 2.0)[1] == ()


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([prorsa(), even(), pearl_prorsa()]),
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 9.0)), min_size=1, max_size=4),
)
def test_whatever_is_forecast_everybody_serves_and_roles_are_paired(
    policy: InStepPolicy, workers: int, demands: list[tuple[float, float]]
) -> None:
    state = running(policy, workers)
    for i, (prefill, decode) in enumerate(demands):
        before = state.table.configuration
        state, effects = step(state, load(prefill, decode, 100.0 + 10 * i))
        assert state.table.active_roles[0] * state.table.active_roles[1] or not any(state.table.active_roles[:2])
        assert not [e for e in effects if isinstance(e, PrepareGroup) and e.kind is GroupKind.BORROW]
        state, _ = settle(state, effects, 101.0 + 10 * i)
        assert state.table.configuration.workers == workers
        assert state.table.configuration.mode is before.mode
        assert {WorkerId(w) for w in state.table.active()} == set(state.table.active())


def test_forecasts_are_refused_where_they_make_no_sense() -> None:
    with pytest.raises(ValueError, match="prefill_tokens = nan"):
        forecasts(running(even()), float("nan"), 1.0)


def test_a_margin_that_nobody_needs_is_not_paid_for() -> None:
    state, effects = forecasts(running(even(persistence_s=60.0)), 0.02, 0.2)
    assert effects == ()
    assert state.table.configuration == Configuration(4, 4)


def test_what_is_wanted_for_long_is_expected_to_stay_wanted() -> None:
    """A switch that half a minute would not repay is made once the demand has lasted."""
    slow = prorsa(SwitchCosts(flip_s=40.0), persistence_s=1.0, first=Configuration(1, 1))
    state, waited = running(slow), 0
    effects: tuple[Effect, ...] = ()
    while not effects:
        state, effects = step(state, load(0.7, 2.1, 100.0 + 10.0 * waited))
        waited += 1
        assert waited <= 12
    assert waited > SETTLED
    assert settle(state, effects, 300.0)[0].table.configuration.decode > 4


def test_decode_is_busy_by_the_rate_of_tokens_where_its_memory_is_nearly_empty() -> None:
    # 40 requests of 10,000 tokens in 10 s, 200 tokens each at 0.36 ms: 0.288 s of every second.
    workload = replace(MEASURED, context_tokens=10_000.0, response_tokens=200.0)
    admits = replace(load(1.0, 0.1), admitted_tokens=400_000.0)
    busy = demand_of([admits], 2, workload, PLATFORM)
    full = demand_of([replace(admits, decode_kv_bytes=2.0 * PLATFORM.kv_capacity_bytes)], 2, workload, PLATFORM)
    assert busy is not None
    assert full is not None
    assert busy.decode == pytest.approx(4 * 200 * 0.36e-3)
    assert full.decode == pytest.approx(2.0)
    # Before a context was measured: sequences of 1,000 tokens, of which 2 · 6.5 / 0.36 = 36.1 are an efficient batch.
    unknown = replace(workload, context_tokens=0.0, new_prompt_tokens=1_000.0)
    early = demand_of([replace(admits, decode_kv_bytes=72.2 * 1_000 * 100_000)], 2, unknown, PLATFORM)
    assert early is not None
    assert early.decode == pytest.approx(2.0, rel=1e-3)


def test_what_the_makespan_model_does_not_expect_to_be_faster_is_not_done_whatever_its_margin() -> None:
    policy = even()

    def chosen(current: Configuration, workload: WorkloadProfile) -> Configuration:
        windows = [replace(load(4.0, 0.5, 100.0 + 10.0 * i), admitted_tokens=1e5) for i in range(SETTLED)]
        decision = policy.answer(windows, current, workload, PLATFORM)
        assert decision is not None
        return decision.selected

    # 7P1D has the largest margin, but one decode worker makes a batch of 64 take a quarter more time.
    assert chosen(Configuration(4, 4), MEASURED) == Configuration(4, 4)
    assert chosen(Configuration(4, 4), WORKLOAD) == Configuration(7, 1)
    # Of one prefill worker the model thinks no better than the margins do.
    assert chosen(Configuration(1, 7), MEASURED).prefill > 1


def test_what_waits_for_a_full_decode_pool_is_work_for_decode() -> None:
    """Two decode workers of 100 GB are full and admit nobody; 600,000 tokens want to pass."""
    full = replace(
        load(1.0, 1.0),
        resident_kv_bytes=0.9 * 2 * PLATFORM.kv_capacity_bytes,
        backlog_tokens=500_000.0,
        prefill_tokens=600_000.0,
    )
    workload = replace(WORKLOAD, context_tokens=1e6)
    blocked = demand_of([full], 2, workload, PLATFORM)
    roomy = demand_of([full], 8, workload, PLATFORM)
    assert blocked is not None
    assert roomy is not None
    assert blocked.decode_kv_bytes == pytest.approx(180e9 + 600_000 * 100_000)
    assert roomy.decode_kv_bytes == full.decode_kv_bytes
    assert target_configuration(blocked, 10).decode > target_configuration(roomy, 10).decode


def test_a_full_decode_pool_must_grow_as_much_as_what_wants_to_pass_exceeds_what_does() -> None:
    """Two workers of 100 GB, full, admit 3 of 9 million tokens a window: 6 of them would admit all."""
    full = replace(load(1.0, 1.0), resident_kv_bytes=190e9, admitted_tokens=3e6, prefill_tokens=9e6, backlog_tokens=7e6)
    workload = replace(WORKLOAD, context_tokens=1e9)

    def decode(forecast: events.LoadForecast) -> float:
        demand = demand_of([forecast], 2, workload, PLATFORM)
        assert demand is not None
        return demand.decode

    assert decode(full) == pytest.approx(3 * 1.9)
    # Contexts that begin alike share memory: what they sum up to may exceed the pool, which then is full.
    assert decode(replace(full, resident_kv_bytes=500e9)) == pytest.approx(6.0)
    assert decode(replace(full, admitted_tokens=9e6)) == pytest.approx(1.9)
    # A trajectory that hardly ever comes back admits nothing, nor a demand without end: what is there, and all of W.
    assert decode(replace(full, admitted_tokens=1e-300)) == decode(replace(full, admitted_tokens=0.0)) == 1.9 + 9.0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1e8),
    st.one_of(st.just(0.0), st.floats(0.0, 1e8)),
    st.floats(0.0, 1e12),
)
def test_decode_demand_is_continuous_in_what_decode_holds_and_never_rises_with_what_it_admits(
    decode: int, filled: float, step_: float, wanted: float, admitted: float, arriving_bytes: float
) -> None:
    pool_bytes = decode * PLATFORM.kv_capacity_bytes
    wanted_bytes = wanted * PLATFORM.kv_bytes_per_token

    def demand_bytes(resident: float, admitted_tokens: float = admitted) -> float:
        forecast = replace(
            load(1.0, 1.0),
            prefill_tokens=wanted,
            admitted_tokens=admitted_tokens,
            resident_kv_bytes=resident,
            decode_kv_bytes=resident + arriving_bytes,
        )
        demand = demand_of([forecast], decode, replace(MEASURED, context_tokens=1e9), PLATFORM)
        assert demand is not None
        return demand.decode_kv_bytes

    resident = filled * pool_bytes
    more = resident + 0.1 * step_ * pool_bytes
    # A fifth of the pool lies between room for all and none; beyond that, what is wanted grows as what it multiplies.
    steepest = (
        2.0 + wanted_bytes / (0.6 * pool_bytes) + (pool_bytes + wanted_bytes + arriving_bytes) / (0.2 * pool_bytes)
    )
    assert abs(demand_bytes(more) - demand_bytes(resident)) <= steepest * (more - resident) * (1 + 1e-9) + 1.0
    assert demand_bytes(resident, admitted * 1.5 + 1.0) <= demand_bytes(resident) * (1 + 1e-9)
    assert demand_bytes(resident) <= resident + max(wanted_bytes, arriving_bytes) + 1.0


def test_decode_demand_passes_from_room_for_all_to_a_full_pool_in_between() -> None:
    def decode(filled: float) -> float:
        forecast = replace(
            load(1.0, 1.0),
            resident_kv_bytes=filled * 2 * PLATFORM.kv_capacity_bytes,
            decode_kv_bytes=filled * 2 * PLATFORM.kv_capacity_bytes,
            admitted_tokens=3e6,
            prefill_tokens=9e6,
        )
        demand = demand_of([forecast], 2, replace(WORKLOAD, context_tokens=1e9), PLATFORM)
        assert demand is not None
        return demand.decode

    assert decode(0.6) == pytest.approx(1.2)
    assert decode(0.7) == pytest.approx(0.5 * 1.4 + 0.5 * 3 * 1.4)
    assert decode(0.8) == pytest.approx(3 * 1.6)
    assert decode(0.8) == pytest.approx(decode(0.8 - 1e-9))


def test_the_makespan_model_has_no_say_against_more_of_a_decode_memory_that_is_full() -> None:
    policy = replace(even(), keeps_prefixes=True)
    workload = replace(MEASURED, context_tokens=20_000.0)

    def chosen(resident: float, live: int) -> Configuration:
        windows = [
            replace(
                load(2.0, 0.1, 100.0 + 10.0 * i, live=live),
                resident_kv_bytes=resident * PLATFORM.kv_capacity_bytes,
                decode_kv_bytes=3.9 * PLATFORM.kv_capacity_bytes,
                prefill_tokens=1e6,
                admitted_tokens=5e5,
            )
            for i in range(SETTLED)
        ]
        decision = policy.answer(windows, Configuration(4, 4), workload, PLATFORM)
        assert decision is not None
        return decision.selected

    assert chosen(3.9, 500).decode > 4
    # With room for all, what the model thinks of the ratios counts.
    assert chosen(0.5, 500) == Configuration(4, 4)


def test_prorsa_begins_with_the_ratio_of_the_profiles() -> None:
    first = running(prorsa()).table.configuration
    assert first == prorsa().decide(workload=WORKLOAD, platform=PLATFORM, budget_workers=8).selected
    assert first.mode is Mode.DISAGGREGATION


def test_where_prefixes_are_stored_for_all_a_switch_loses_none() -> None:
    workload = replace(MEASURED, context_tokens=20_000.0)
    windows = [replace(load(0.3, 3.9, 100.0 + 10.0 * i), admitted_tokens=1e5) for i in range(SETTLED)]
    windows = [replace(window, decode_kv_bytes=3.9 * PLATFORM.kv_capacity_bytes) for window in windows]
    decisions = [
        replace(even(), keeps_prefixes=keeps).answer(windows, Configuration(4, 4), workload, PLATFORM)
        for keeps in (False, True)
    ]
    lost_s, kept_s = (
        float(decision.limits[0].rsplit("costs ", 1)[1].split()[0]) for decision in decisions if decision is not None
    )
    # Three workers of eight do not serve for 5 s; the prefill workers hold 64 contexts of 20,000 tokens at 20 us.
    assert kept_s == pytest.approx(3 * 5.0 / 8.0, abs=0.05)
    assert lost_s > kept_s + 3 / 8 * 64 * 20_000 * 20e-6


def test_roles_do_not_change_for_a_queue_that_is_gone_before_they_have() -> None:
    """Newer weights make every context new: for some seconds prefill has more work than it can do, then hardly any."""

    def chosen(waiting: float, arriving_per_s: float) -> Configuration:
        windows = [
            replace(
                load(6.0, 1.5, 100.0 + 10.0 * i),
                backlog_tokens=waiting * 6.0 * 10.0 * 50_000.0,
                arriving_tokens_per_s=arriving_per_s,
            )
            for i in range(SETTLED)
        ]
        decision = even().answer(windows, Configuration(4, 4), WORKLOAD, PLATFORM)
        assert decision is not None
        return decision.selected

    # All of it arrives: it will go on arriving.
    assert chosen(0.0, 50_000.0).prefill > 4
    # Nine tenths wait, and what arrives is computed twenty times as fast: the queue lasts for 13.6 of 60 s.
    assert chosen(0.9, 1e6) == Configuration(4, 4)


def test_of_a_steady_load_prorsa_begins_with_the_ratio_for_all_that_is_under_way() -> None:
    """A steady load's model keeps outside who finds no room for its KV; Prorsa keeps nobody there."""
    tight = replace(PLATFORM, kv_capacity_bytes=20e9)
    crowd = replace(MEASURED, batch=2_000, context_tokens=15_000.0, turn_environment_s=17.0)

    def first(workload: WorkloadProfile, policy: InStepPolicy) -> Configuration:
        return policy.decide(workload=workload, platform=tight, budget_workers=8).selected

    assert first(replace(crowd, steady=True), prorsa()) == first(crowd, prorsa())
    composed = pearl_prorsa()
    assert first(replace(crowd, steady=True), composed) == first(replace(crowd, steady=True), composed.between)


def test_prefixes_that_all_share_are_not_lost_by_those_that_move() -> None:
    """Half of the contexts move between prefill workers: work for prefill, unless storage keeps them for all."""
    moving = replace(
        MEASURED, context_tokens=20_000.0, turn_environment_s=10.0, mean_turns=16.0, pair_moved_fraction=0.5
    )

    def chosen(workload: WorkloadProfile, keeps: bool) -> Configuration:
        windows = [replace(load(0.5, 0.0, 100.0 + 10.0 * i, live=400), admitted_tokens=8e6) for i in range(SETTLED)]
        decision = replace(even(), keeps_prefixes=keeps).answer(windows, Configuration(6, 2), workload, PLATFORM)
        assert decision is not None
        return decision.selected

    assert chosen(moving, True) == chosen(replace(moving, pair_moved_fraction=0.0), True) != Configuration(6, 2)
    assert chosen(moving, False) == Configuration(6, 2)
