"""The mode of the next update: by the cost models, and changed once that has paid."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_planner.ref_actor import RefActorMode
from pearl_planner.update_mode import PassCosts, UpdateLoad, UpdateMode, costs_in, decide_update_mode

COSTS = PassCosts(reference_s=0.01, actor_s=0.03, swap_s=0.5)
TOGETHER, APART = RefActorMode.COLOCATED, RefActorMode.DECOUPLED


def load(micro_batches: int, *, steps: int = 1, tokens: float = 100.0) -> UpdateLoad:
    return UpdateLoad(optimizer_steps=steps, ready_s=(0.0,) * micro_batches, micro_batch_tokens=tokens)


def decide(held: RefActorMode = TOGETHER, behind_s: float = 0.0, **given: object) -> UpdateMode:
    asked: dict[str, object] = {
        "colocated": load(8, steps=2),
        "decoupled": load(6, steps=2, tokens=400 / 3),
        "costs": {TOGETHER: COSTS, APART: COSTS},
        "ranks": 4,
        "reform_s": 1.0,
    }
    return decide_update_mode(held, behind_s, **{**asked, **given})  # type: ignore[arg-type]


def test_both_modes_are_asked_for_the_same_gpus() -> None:
    """Two steps of 8 micro-batches of 100 tokens on four ranks: 0.5 + 2·1 + 0.5 + 2·3 = 9 s each.

    Decoupled 6 of 133⅓ tokens on three actors: references end at 4/3, 8/3, …, 8; actors take 4 s each. The first three
    backwards (8/3 s) begin with their references and end at 4, 16/3, 20/3; the second three begin with theirs at 16/3,
    20/3, 8 (forwards end at 16/3, 20/3, 8) and end at 8, 28/3, 32/3.
    """
    made = decide()
    assert made.colocated_s == pytest.approx(18.0)
    assert made.decoupled_s == pytest.approx(2 * 32 / 3)
    assert (made.mode, made.changes, made.behind_s, made.ras, made.tprm_s) == (TOGETHER, False, 0.0, 8, 0.0)


def test_it_changes_once_the_other_would_have_saved_what_forming_ranks_takes() -> None:
    """Swaps of 2 s make colocated 24 s of two steps, 8/3 s more than decoupled."""
    dear = {TOGETHER: PassCosts(reference_s=0.01, actor_s=0.03, swap_s=2.0)}
    first = decide(costs=dear, reform_s=5.0)
    assert (first.mode, first.changes) == (TOGETHER, False)
    assert first.behind_s == pytest.approx(8 / 3)
    second = decide(behind_s=first.behind_s, costs=dear, reform_s=5.0)
    assert (second.mode, second.changes) == (APART, True)
    assert second.behind_s == pytest.approx(16 / 3)
    back = decide(APART, costs={APART: COSTS}, reform_s=3.0)
    assert (back.mode, back.changes) == (TOGETHER, True)
    assert back.behind_s == pytest.approx(10 / 3)
    assert back.ras == 6


def test_without_a_measurement_or_a_second_rank_nothing_changes() -> None:
    blind = decide(costs={}, behind_s=3.0)
    assert (blind.mode, blind.changes) == (TOGETHER, False)
    assert (blind.colocated_s, blind.decoupled_s, blind.printed_colocated_s) == (None, None, None)
    alone = decide(colocated=load(2), decoupled=None, ranks=1)
    assert (alone.mode, alone.colocated_s, alone.decoupled_s) == (TOGETHER, pytest.approx(9.0), None)


def test_printed_costs_stand_beside_those_that_decide() -> None:
    """C_col of one rank: 0.5 + 8 + 0.5 + 24 = 33 s; C_dec: (0 + 1 + 2)·4/3 fill, and 6 · 4 s. Two steps of each."""
    made = decide()
    assert made.printed_colocated_s == pytest.approx(66.0)
    assert made.printed_decoupled_s == pytest.approx(2 * (4 + 24))


def test_each_mode_has_its_own_costs_and_one_that_never_ran_those_of_the_other() -> None:
    """Sharded, the reference takes 2 s for 100 tokens; alone no more than the actor's forward, which is 1 s."""
    sharded, alone = (
        PassCosts(reference_s=0.02, actor_s=0.03, swap_s=0.5),
        PassCosts(reference_s=0.005, actor_s=0.04, swap_s=0.5),
    )
    assert costs_in(APART, {}) is None
    assert costs_in(TOGETHER, {TOGETHER: sharded}) == sharded
    assert costs_in(APART, {TOGETHER: sharded}) == COSTS
    assert costs_in(TOGETHER, {APART: alone}) == alone
    both = {TOGETHER: sharded, APART: alone}
    assert (costs_in(TOGETHER, both), costs_in(APART, both)) == (sharded, alone)
    made = decide(costs={TOGETHER: sharded})
    assert (made.colocated_s, made.decoupled_s) == (pytest.approx(2 * 11), pytest.approx(2 * 32 / 3))


def test_costs_move_towards_what_was_measured_last() -> None:
    newer = COSTS.towards(PassCosts(reference_s=0.02, actor_s=0.05, swap_s=0.1), 0.25)
    assert newer.reference_s == pytest.approx(0.0125)
    assert newer.actor_s == pytest.approx(0.035)
    assert newer.swap_s == pytest.approx(0.4)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0.001, 0.1), st.floats(0.001, 0.1), st.floats(0, 5)), min_size=1, max_size=12),
    st.integers(2, 5),
    st.floats(0, 20),
)
def test_changes_cost_no_more_than_what_they_were_waited_for(
    updates: list[tuple[float, float, float]], ranks: int, reform_s: float
) -> None:
    """Between two changes the mode that was left had fallen behind by more than forming anew takes."""
    held, behind_s, lost_s = TOGETHER, 0.0, 0.0
    for reference_s, actor_s, swap_s in updates:
        costs = {held: PassCosts(reference_s=reference_s, actor_s=actor_s, swap_s=swap_s)}
        together, apart = load(ranks * 3), load((ranks - 1) * 3)
        made = decide(held, behind_s, colocated=together, decoupled=apart, costs=costs, ranks=ranks, reform_s=reform_s)
        assert made.colocated_s is not None
        assert made.decoupled_s is not None
        saves_s = (made.colocated_s - made.decoupled_s) * (1 if held is TOGETHER else -1)
        lost_s += max(0.0, saves_s)
        if made.changes:
            assert made.mode is not held
            assert saves_s > 0
            assert reform_s < made.behind_s <= lost_s + 1e-9
            held, behind_s, lost_s = made.mode, 0.0, 0.0
        else:
            assert made.mode is held
            behind_s = made.behind_s
