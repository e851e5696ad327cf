"""What transfer backends and device memory allow, asked before anything is changed."""

from itertools import permutations

import pytest

from pearl_planner.backends import BACKENDS, Backend, backend_needs
from pearl_planner.memory import MemoryOrderError, check_memory, peak_bytes, wake_up
from pearl_planner.transition import PlanError, plan_transition
from pearl_state.configuration import Configuration
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId, TransitionPlan
from pearl_state.roles import Role, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, Worker, WorkerId

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
GB = 1e9


def plan(
    active: list[Role], prepared: list[Role], members: list[int], target: str
) -> tuple[WorkerTable, TransitionPlan]:
    workers = [
        Worker(id=WorkerId(i), gpus=frozenset({GpuId(i)}), role=role, zone=Zone.DEDICATED)
        for i, role in enumerate([*active, *prepared])
    ]
    ids = [w.id for w in workers]
    table = WorkerTable().bind(*workers).move(ids, Lifecycle.STARTING).move(ids, Lifecycle.PENDING_WEIGHTS)
    for id_ in ids:
        table = table.report(id_, 0)
    table = table.move(ids[: len(active)], Lifecycle.ACTIVE)
    return table, plan_transition(
        table, members=map(WorkerId, members), target=Configuration.parse(target), plan_id=PlanId(1)
    )


def replaced_prefill() -> tuple[WorkerTable, TransitionPlan]:
    """P0 of 1P4D is replaced by a prepared worker."""
    return plan([P, D, D, D, D], [P], [1, 2, 3, 4, 5], "1P4D")


def test_decode_workers_renew_what_they_know_when_their_prefill_worker_is_replaced():
    """NIXL#795, sglang#10365, llm-d#2187: a restarted prefill worker cannot be reached again."""
    table, made = replaced_prefill()
    needs = backend_needs(table, made, BACKENDS["nixl"])
    assert set().union(*needs.refresh_peers.values()) == {1, 2, 3, 4}
    assert backend_needs(table, made, BACKENDS["mooncake"]).refresh_peers == {}


def test_a_backend_that_cannot_renew_refuses_the_plan_before_any_change():
    table, made = replaced_prefill()
    lost = Backend(name="stale", flips_in_place=True, finds_peers=False, renews_peers=False)
    with pytest.raises(PlanError, match="4 decode workers cannot reach over stale"):
        backend_needs(table, made, lost)
    # Nobody is left who would have to renew anything.
    table, made = plan([C, C, C], [], [0, 1, 2], "1P2D")
    assert backend_needs(table, made, lost).refresh_peers == {}


@pytest.mark.parametrize(
    ("backend", "options", "relaunched"),
    [
        ("mooncake_tcp", {}, 0),
        ("nixl", {}, 1),
        ("mooncake", {"expert_parallel": 2}, 1),
        ("mooncake", {"pipeline_parallel": 2}, 1),
        ("local", {}, 0),
    ],
)
def test_a_flip_that_the_engine_cannot_do_in_place_is_a_relaunch(backend, options, relaunched):
    """sglang PR #28403: in-place role switch with mooncake and mori only, without expert or pipeline parallelism."""
    table, made = plan([P, P, D, D, D], [], [0, 1, 2, 3, 4], "3P2D")
    assert len(backend_needs(table, made, BACKENDS[backend], **options).relaunch) == relaunched


def test_a_mode_switch_relaunches_where_the_engine_is_started_for_one_mode():
    table, made = plan([C, C, C], [], [0, 1, 2], "1P2D")
    assert backend_needs(table, made, BACKENDS["mooncake"]).relaunch == {0, 1, 2}
    assert backend_needs(table, made, BACKENDS["local"]).relaunch == frozenset()


def test_waking_up_in_order_stays_at_what_serving_needs():
    """verl#632, vllm#15254, NeMo-RL#191: old weights, new weights and KV at once do not fit."""
    steps = wake_up(weight_bytes=16 * GB, kv_bytes=50 * GB, staging_bytes=16 * GB, graph_bytes=2 * GB)
    assert peak_bytes(steps) == 68 * GB
    check_memory(steps, free_bytes=70 * GB)
    early_kv = [steps[0], steps[3], steps[1], steps[2], steps[4]]
    with pytest.raises(MemoryOrderError, match=r"'synchronize weights' needs 82\.0 GB of 70\.0 GB"):
        check_memory(early_kv, free_bytes=70 * GB)


def test_no_order_that_stages_before_it_frees_has_a_lower_peak():
    steps = wake_up(weight_bytes=3.0, kv_bytes=5.0, staging_bytes=4.0, graph_bytes=1.0)
    legal = [o for o in permutations(steps) if o.index(steps[0]) < o.index(steps[1]) < o.index(steps[2])]
    assert peak_bytes(steps) == min(peak_bytes(order) for order in legal)
    assert peak_bytes([]) == 0.0
