"""The table against a naive model that recomputes everything from the rows alone."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pearl_state.table
from pearl_state.configuration import Configuration
from pearl_state.errors import ConfigurationError, IllegalTransitionError, InvariantError, StateError
from pearl_state.lifecycle import HOLDS_GPU, TRANSITIONS, Lifecycle
from pearl_state.roles import Role, Tenure, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, Worker, WorkerId

INVARIANTS = {
    "fixed_binding",
    "one_owner_per_gpu",
    "paired_roles",
    "admitted_up_to_date",
    "no_stale_serving",
    "monotonic_versions",
    "incarnation_grows",
}


def worker(slot: int, role: Role = Role.COLOCATED, *, gpu: int | None = None, zone: Zone = Zone.DEDICATED) -> Worker:
    return Worker(id=WorkerId(slot), gpus=frozenset({GpuId(slot if gpu is None else gpu)}), role=role, zone=zone)


def mixed_table() -> WorkerTable:
    """Two slots of each rollout role, and an overlap worker that shares its GPU with a training worker."""
    return (
        WorkerTable()
        .bind(
            *(worker(i, role) for i, role in enumerate((Role.PREFILL, Role.DECODE, Role.COLOCATED) * 2)),
            worker(6, Role.TRAINING, gpu=99, zone=Zone.OVERLAP),
            worker(7, Role.COLOCATED, gpu=99, zone=Zone.OVERLAP),
        )
        .publish(1)
    )


def activate(table: WorkerTable, *slots: int) -> WorkerTable:
    ids = [WorkerId(slot) for slot in slots]
    table = table.move(ids, Lifecycle.STARTING).move(ids, Lifecycle.PENDING_WEIGHTS)
    for id_ in ids:
        table = table.report(id_, table.target_version)
    return table.move(ids, Lifecycle.ACTIVE)


# ---- the model ------------------------------------------------------------------------------------------------------


def broken_by_rows(table: WorkerTable) -> set[str]:
    """Invariants that hold for a table as such and do not."""
    broken = set()
    held = [gpu for row in table.rows.values() if row.lifecycle in HOLDS_GPU for gpu in row.gpus]
    if len(held) != len(set(held)):
        broken.add("one_owner_per_gpu")
    active = [row for row in table.rows.values() if row.lifecycle is Lifecycle.ACTIVE]
    roles = [row.role for row in active]
    if (Role.PREFILL in roles) is not (Role.DECODE in roles):
        broken.add("paired_roles")
    if any(
        row.role is not Role.TRAINING and (row.weight_version is None or row.weight_version < table.floor_version)
        for row in active
    ):
        broken.add("no_stale_serving")
    if table.floor_version > table.target_version:
        broken.add("monotonic_versions")
    if any(row.incarnation > table.incarnations[row.id] for row in table.rows.values()):
        broken.add("incarnation_grows")
    return broken


def broken_by_change(table: WorkerTable, changed: Iterable[Worker]) -> set[str]:
    """Everything that a change would break, by a rule at a time."""
    broken = set()
    after = dict(table.rows)
    for new in changed:
        old = table.rows[new.id]
        after[new.id] = new
        if old.lifecycle is not new.lifecycle and (old.lifecycle, new.lifecycle) not in TRANSITIONS:
            broken.add("transition")
        serves = old.lifecycle is new.lifecycle is Lifecycle.ACTIVE
        if serves and old.role is not new.role:
            broken.add("transition")
        if (old.gpus, old.zone) != (new.gpus, new.zone):
            broken.add("fixed_binding")
        if (old.role is Role.TRAINING) is not (new.role is Role.TRAINING):
            broken.add("fixed_binding")
        starts = new.lifecycle is Lifecycle.STARTING and old.lifecycle is not Lifecycle.STARTING
        if (starts or new.incarnation != old.incarnation) and new.incarnation <= table.incarnations[new.id]:
            broken.add("incarnation_grows")
        if new.incarnation != old.incarnation and new.lifecycle is not Lifecycle.STARTING:
            broken.add("incarnation_grows")
        versions = (old.weight_version, new.weight_version)
        if None not in versions and versions[1] < versions[0] and new.incarnation == old.incarnation:  # type: ignore[operator]
            broken.add("monotonic_versions")
        admitted = new.lifecycle is Lifecycle.ACTIVE and old.lifecycle is not Lifecycle.ACTIVE
        serving = [row for row in table.rows.values() if row.lifecycle is Lifecycle.ACTIVE]
        newest = [row.weight_version or 0 for row in serving if row.role is not Role.TRAINING]
        taken = range(max(newest, default=table.target_version), table.target_version + 1)
        if admitted and new.role is not Role.TRAINING and new.weight_version not in {*taken, table.target_version}:
            broken.add("admitted_up_to_date")
    return broken | broken_by_rows(replace(table, rows=after, incarnations=dict.fromkeys(after, 10**9)))


def check_bookkeeping(table: WorkerTable) -> None:
    """What the table keeps beside its rows equals what the rows say."""
    assert broken_by_rows(table) == set()
    assert table.holders == {
        gpu: row.id for row in table.rows.values() if row.lifecycle in HOLDS_GPU for gpu in row.gpus
    }
    active = [table.rows[id_].role for id_ in table.active()]
    assert table.active_roles == tuple(active.count(r) for r in (Role.PREFILL, Role.DECODE, Role.COLOCATED))
    assert list(table.rows) == sorted(table.rows)


def any_change(dice: random.Random, table: WorkerTable) -> list[Worker]:
    """One to three rows, mostly changed as a caller would, sometimes in any way at all."""
    changed = []
    for id_ in dice.sample(sorted(table.rows), dice.randint(1, 3)):
        row = table.rows[id_]
        near = [state for state in Lifecycle if (row.lifecycle, state) in TRANSITIONS]
        lifecycle = dice.choice(near if dice.random() < 0.85 else list(Lifecycle))
        starts = lifecycle is Lifecycle.STARTING and row.lifecycle is not Lifecycle.STARTING
        versions = (row.weight_version, table.target_version, table.target_version, None, dice.randint(0, 4))
        new = replace(
            row,
            lifecycle=lifecycle,
            incarnation=table.incarnations[id_] + 1 if starts else row.incarnation,
            weight_version=dice.choice(versions),
        )
        match dice.randrange(25):
            case 0:
                new = replace(new, role=dice.choice(list(Role)))
            case 1:
                new = replace(new, incarnation=dice.randint(0, 5))
            case 2:
                new = replace(new, gpus=frozenset({GpuId(dice.randint(0, 7))}))
            case 3:
                new = replace(new, zone=dice.choice(list(Zone)))
            case _:
                pass
        changed.append(new)
    return changed


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_change_is_taken_if_and_only_if_it_breaks_nothing(seed: int) -> None:
    dice = random.Random(seed)
    table = activate(mixed_table(), *dice.choice([(), (0, 1), (2, 5), (0, 1, 3, 4), (6,), (7,)]))
    for _ in range(30):
        if dice.random() < 0.1:
            table = table.publish(table.target_version + 1)
        before = (dict(table.rows), dict(table.holders), dict(table.incarnations), table.active_roles)
        changed = any_change(dice, table)
        broken = broken_by_change(table, changed)
        try:
            after = table.update(changed)
        except (IllegalTransitionError, InvariantError) as error:
            refused_for = getattr(error, "invariant", "transition")
        else:
            assert broken == set(), "a change was taken that breaks a rule"
            assert after.version == table.version + 1
            assert after.rows == {**table.rows, **{w.id: w for w in changed}}
            check_bookkeeping(after)
            table = after
            continue
        assert refused_for in broken, "a change was refused for a rule that it keeps"
        assert refused_for in INVARIANTS | {"transition"}
        assert before == (dict(table.rows), dict(table.holders), dict(table.incarnations), table.active_roles)


@settings(max_examples=200, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), st.sampled_from(list(Lifecycle))),
        max_size=40,
    )
)
def test_moves_keep_every_invariant_or_change_nothing(moves: list[tuple[list[int], Lifecycle]]) -> None:
    table = mixed_table()
    for slots, lifecycle in moves:
        ids = [WorkerId(slot) for slot in slots]
        try:
            after = table.move(ids, lifecycle)
        except StateError:
            check_bookkeeping(table)
            continue
        assert {after.rows[id_].lifecycle for id_ in ids} == {lifecycle}
        for id_ in ids:
            if lifecycle is Lifecycle.STARTING and table.rows[id_].lifecycle is not lifecycle:
                assert after.rows[id_].incarnation == table.incarnations[id_] + 1
            if lifecycle in (Lifecycle.VACANT, Lifecycle.RELEASED):
                assert after.rows[id_].weight_version is None
        check_bookkeeping(after)
        table = after


# ---- each invariant by name -----------------------------------------------------------------------------------------


def broken_invariant(name: str) -> "pytest.RaisesContext[InvariantError]":
    return pytest.raises(InvariantError, match=f"^{name}: ")


def test_the_documented_invariants_are_those_that_errors_carry() -> None:
    text = pearl_state.table.__doc__ or ""
    assert {line.split("`")[1] for line in text.splitlines() if line.startswith("- `")} == INVARIANTS


def test_two_workers_never_hold_one_gpu() -> None:
    table = activate(mixed_table(), 6)
    with broken_invariant("one_owner_per_gpu"):
        table.move([WorkerId(7)], Lifecycle.STARTING)
    table = table.move([WorkerId(6)], Lifecycle.DRAINING).move([WorkerId(6)], Lifecycle.RELEASED)
    assert table.move([WorkerId(7)], Lifecycle.STARTING).holders[GpuId(99)] == 7


def test_a_gpu_changes_hands_in_one_update_whatever_the_order() -> None:
    table = activate(mixed_table(), 6).move([WorkerId(6)], Lifecycle.DRAINING)
    out = replace(table.rows[WorkerId(6)], lifecycle=Lifecycle.RELEASED, weight_version=None)
    into = replace(table.rows[WorkerId(7)], lifecycle=Lifecycle.STARTING, incarnation=1)
    for order in ([out, into], [into, out]):
        assert table.update(order).holders[GpuId(99)] == 7


def test_a_worker_may_take_two_steps_in_one_update() -> None:
    table = activate(mixed_table(), 2, 5)
    drained = replace(table.rows[WorkerId(2)], lifecycle=Lifecycle.DRAINING)
    gone = replace(drained, lifecycle=Lifecycle.VACANT, weight_version=None)
    after = table.update([drained, gone])
    check_bookkeeping(after)
    assert after.active() == (5,)


def test_a_failed_worker_still_holds_its_gpu_until_it_was_cleaned() -> None:
    table = activate(mixed_table(), 7).move([WorkerId(7)], Lifecycle.FAILED)
    assert table.holders[GpuId(99)] == 7
    assert GpuId(99) not in table.move([WorkerId(7)], Lifecycle.VACANT).holders


def test_prefill_never_serves_without_decode_nor_the_reverse() -> None:
    table = activate(mixed_table(), 0, 1)
    for slot in (0, 1):
        with broken_invariant("paired_roles"):
            table.move([WorkerId(slot)], Lifecycle.DRAINING)
    with broken_invariant("paired_roles"):
        activate(mixed_table(), 0)
    assert table.move([WorkerId(0), WorkerId(1)], Lifecycle.DRAINING).active() == ()


def test_admission_needs_the_newest_weights_that_serve_and_a_restart_reports_anew() -> None:
    """radixark/miles#1724: a replacement engine must not serve with its checkpoint's weights."""
    table = activate(mixed_table(), 2).publish(57)
    table = table.move([WorkerId(5)], Lifecycle.STARTING).move([WorkerId(5)], Lifecycle.PENDING_WEIGHTS)
    alone = table.move([WorkerId(2)], Lifecycle.DRAINING)
    beside = table.report(WorkerId(2), 57)
    for where, versions in ((table, (None, 0, 58)), (alone, (None, 1, 56, 58)), (beside, (None, 56, 58))):
        for version in versions:
            row = replace(where.rows[WorkerId(5)], weight_version=version, lifecycle=Lifecycle.ACTIVE)
            with broken_invariant("admitted_up_to_date"):
                where.update([row])
    table = table.report(WorkerId(5), 57).move([WorkerId(5)], Lifecycle.ACTIVE)
    restarted = table.move([WorkerId(5)], Lifecycle.FAILED).move([WorkerId(5)], Lifecycle.VACANT)
    assert restarted.rows[WorkerId(5)].weight_version is None
    assert restarted.rows[WorkerId(5)].failures == 1


def test_the_floor_rises_only_over_workers_that_hold_it() -> None:
    table = activate(mixed_table(), 2).publish(3)
    with broken_invariant("no_stale_serving"):
        table.raise_floor(3)
    table = table.report(WorkerId(2), 3).raise_floor(3)
    with broken_invariant("monotonic_versions"):
        table.raise_floor(2)
    with broken_invariant("monotonic_versions"):
        table.raise_floor(4)
    stale = replace(table.rows[WorkerId(2)], weight_version=None)
    with broken_invariant("no_stale_serving"):
        table.update([stale])


def test_versions_never_go_back() -> None:
    """radixark/miles#2835: versions that restart at 1 after a resume make staleness negative."""
    table = activate(mixed_table().publish(55), 2).publish(57)
    with broken_invariant("monotonic_versions"):
        table.publish(1)
    with broken_invariant("monotonic_versions"):
        table.report(WorkerId(2), 54)


def test_incarnations_grow_even_over_unbinding() -> None:
    table = activate(mixed_table(), 2).move([WorkerId(2)], Lifecycle.DRAINING).move([WorkerId(2)], Lifecycle.VACANT)
    table = table.unbind([WorkerId(2)]).bind(worker(2))
    assert table.rows[WorkerId(2)].incarnation == 1
    assert table.move([WorkerId(2)], Lifecycle.STARTING).rows[WorkerId(2)].incarnation == 2
    again = replace(table.rows[WorkerId(2)], lifecycle=Lifecycle.STARTING, incarnation=1)
    with broken_invariant("incarnation_grows"):
        table.update([again])


def test_bindings_are_for_life() -> None:
    table = mixed_table()
    for row in (
        replace(table.rows[WorkerId(0)], gpus=frozenset({GpuId(50)})),
        replace(table.rows[WorkerId(0)], zone=Zone.OVERLAP),
        replace(table.rows[WorkerId(0)], role=Role.TRAINING),
        replace(table.rows[WorkerId(6)], role=Role.COLOCATED),
    ):
        with broken_invariant("fixed_binding"):
            table.update([row])
    for bad in (worker(0), replace(worker(20), gpus=frozenset()), replace(worker(20), lifecycle=Lifecycle.ACTIVE)):
        with broken_invariant("fixed_binding"):
            table.bind(bad)
    with broken_invariant("fixed_binding"):
        activate(table, 2).unbind([WorkerId(2)])


def test_a_role_does_not_change_while_it_serves() -> None:
    table = activate(mixed_table(), 0, 1, 3, 4)
    with pytest.raises(IllegalTransitionError, match="while it serves"):
        table.set_roles({WorkerId(0): Role.DECODE})
    table = table.move([WorkerId(3)], Lifecycle.DRAINING).set_roles({WorkerId(3): Role.DECODE})
    assert table.rows[WorkerId(3)].role is Role.DECODE


# ---- reading --------------------------------------------------------------------------------------------------------


def test_slots_are_never_renumbered_and_the_lowest_free_one_is_used() -> None:
    table = mixed_table().unbind([WorkerId(3), WorkerId(1)])
    assert table.free_slots(1) == [1]
    assert table.free_slots(3) == [1, 3, 8]
    assert table.bind(worker(1)).free_slots(1) == [3]
    assert list(table.bind(worker(1)).rows) == [0, 1, 2, 4, 5, 6, 7]


def test_filters_and_counts_agree() -> None:
    table = activate(mixed_table(), 0, 1, 6)
    assert table.active() == (0, 1)
    assert table.active(Role.DECODE) == (1,)
    assert table.training() == (6,)
    assert table.rollout() == (0, 1, 2, 3, 4, 5, 7)
    assert table.where(Lifecycle.ACTIVE, zone=Zone.OVERLAP) == (6,)
    assert table.where(role=Role.COLOCATED, tenure=Tenure.RESERVED) == (2, 5, 7)
    assert table.configuration == Configuration(prefill=1, decode=1)


def test_what_was_read_of_a_table_is_never_said_of_the_next_one() -> None:
    table = activate(mixed_table(), 0, 1, 6)
    assert (table.active(), table.where(cordoned=True), table.where(cordoned=False)[:2]) == ((0, 1), (), (0, 1))
    fenced = table.update([replace(table.rows[WorkerId(1)], cordoned=True)])
    gone = fenced.move([WorkerId(0), WorkerId(1)], Lifecycle.DRAINING)
    assert (fenced.where(cordoned=True), gone.where(cordoned=True)) == ((1,), (1,))
    assert (table.active(), fenced.active(), gone.active()) == ((0, 1), (0, 1), ())
    assert table.where(Lifecycle.DRAINING) == ()
    assert gone.where(Lifecycle.DRAINING) == (0, 1)
    assert table == replace(table), "what was read is no part of its value"


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ({"active_roles": (0, 0, 2)}, "paired_roles"),
        ({"holders": {}}, "one_owner_per_gpu"),
        ({"incarnations": {}}, "incarnation_grows"),
        ({"floor_version": 9}, "monotonic_versions"),
        ({"target_version": 9, "floor_version": 9}, "no_stale_serving"),
        ({"rows": {WorkerId(9): worker(1)}}, "fixed_binding"),
    ],
)
def test_a_table_that_no_changes_lead_to_is_told_from_one_that_they_do(change, invariant: str) -> None:
    table = activate(mixed_table(), 0, 1, 6)
    table.check()
    with pytest.raises(InvariantError) as error:
        replace(table, **change).check()
    assert error.value.invariant == invariant


def test_a_table_that_mixes_both_modes_has_no_configuration() -> None:
    with pytest.raises(ConfigurationError, match="mixes colocated"):
        activate(activate(mixed_table(), 0, 1), 2).configuration  # noqa: B018


def test_a_worker_may_be_ahead_of_the_target_and_a_table_with_it_is_read_again() -> None:
    """It loads what is newest, and may be up with it before the event that tells of it."""
    activate(mixed_table(), 2).report(WorkerId(2), 99).check()
