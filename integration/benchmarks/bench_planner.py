"""How long decisions, plans and table updates take on one core: `python integration/benchmarks/bench_planner.py`.

Prints the best of many repeats, since other work on the machine only ever adds time.
"""

import argparse
import json
import timeit
from collections.abc import Callable
from dataclasses import replace

from pearl_planner import WorkerCosts, decide, find_profile, plan_transition, verify_plan
from pearl_planner.allocate import Demand, target_configuration
from pearl_planner.forecast import WorkloadPredictor
from pearl_state import (
    Configuration,
    GpuId,
    Lifecycle,
    PlanId,
    PlatformProfile,
    Role,
    Worker,
    WorkerId,
    WorkerTable,
    WorkloadProfile,
    Zone,
)
from pearl_state.phases import PhaseChange, follow_up
from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.trajectory import TrajectoryPhase as Phase

PROFILE = find_profile("swe-32k")
WORKLOAD = WorkloadProfile(**PROFILE.workload)
PLATFORM = PlatformProfile(**PROFILE.platform)
# As telemetry fills it: every term of the extended model is at work.
MEASURED = replace(
    WORKLOAD,
    turns=30,
    mean_turns=16,
    turn_environment_s=1.0,
    retained_tokens=60,
    moved_fraction=0.2,
    pair_moved_fraction=0.3,
    renewed_fraction=0.1,
    active_by_turn=tuple(max(0.03, 1 - i / 30) for i in range(30)),
)


def best_s(run: Callable[[], object], *, number: int, repeats: int) -> float:
    """Seconds of one call, best of `repeats` rounds of `number` calls."""
    run()
    return min(timeit.repeat(run, number=number, repeat=repeats)) / number


def cluster(configuration: Configuration, *, prepared: int = 0) -> WorkerTable:
    """A table whose active workers have `configuration`, and `prepared` decode workers that wait for admission."""
    roles = [role for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED) for _ in range(configuration.count(role))]
    active = len(roles)
    roles += [Role.DECODE] * prepared
    rows = [
        Worker(id=WorkerId(i), gpus=frozenset({GpuId(i)}), role=role, zone=Zone.DEDICATED)
        for i, role in enumerate(roles)
    ]
    ids = [row.id for row in rows]
    table = WorkerTable().bind(*rows).move(ids, Lifecycle.STARTING).move(ids, Lifecycle.PENDING_WEIGHTS)
    table = table.update([replace(row, weight_version=0) for row in table.rows.values()])
    return table.move(ids[:active], Lifecycle.ACTIVE)


def decisions(repeats: int) -> dict[str, float]:
    """Seconds of a decision with its explanation and with hysteresis against another ratio."""
    out = {}
    for name, workload in (("bundled profile", WORKLOAD), ("measured profile", MEASURED)):
        for workers in (16, 1_000, 100_000):
            current = Configuration(workers // 2, workers - workers // 2)
            out[f"decide, {workers} workers, {name}"] = best_s(
                lambda workload=workload, workers=workers, current=current: decide(
                    workload=workload, platform=PLATFORM, budget_workers=workers, current=current
                ),
                number=10,
                repeats=repeats,
            )
    return out


def plans(repeats: int) -> dict[str, float]:
    """Seconds of a plan over 10,000 workers: a change of ratio, a mode switch, and an expansion with departures."""
    target = Configuration(4_000, 6_000)
    sources = {
        "ratio": (cluster(Configuration(3_000, 7_000)), range(10_000)),
        "mode": (cluster(Configuration(colocated=10_000)), range(10_000)),
        "membership": (cluster(Configuration(3_000, 7_000), prepared=1_000), range(1_000, 11_000)),
    }
    out = {}
    for name, (table, ids) in sources.items():
        members = [WorkerId(i) for i in ids]
        costs = WorkerCosts(load={id_: float(id_ % 17) for id_ in members})

        def run(table: WorkerTable = table, members: list[WorkerId] = members, costs: WorkerCosts = costs) -> object:
            return plan_transition(table, members=members, target=target, plan_id=PlanId(1), costs=costs)

        verify_plan(table, run())
        out[f"plan, 10,000 workers, {name}"] = best_s(run, number=1, repeats=repeats)
    return out


def updates(repeats: int) -> dict[str, float]:
    """Seconds of one validated row update, alone in a small table and together with others in a large one."""
    out = {}
    small = cluster(Configuration(colocated=16))
    row = small.rows[WorkerId(3)]
    out["table update, 1 of 16 rows"] = best_s(
        lambda: small.update([replace(row, failures=1)]), number=100, repeats=repeats
    )
    large = cluster(Configuration(colocated=10_000))
    changed = [replace(row, lifecycle=Lifecycle.DRAINING) for row in large.rows.values()]
    out["table update, a row of 10,000 at once"] = best_s(
        lambda: large.update(changed), number=1, repeats=repeats
    ) / len(changed)
    return out


def forecasts(repeats: int) -> dict[str, float]:
    """Seconds of a forecast with its allocation for 1,000 live trajectories and 64 instances."""
    predictor, instances = live_trajectories(1_000), [WorkerId(i) for i in range(64)]

    def run() -> object:
        found = predictor.forecast(
            1_000.0, prefill=instances, profiled_tokens_per_s=50_000.0, kv_bytes_per_token=147_456.0
        )
        demand = Demand(
            prefill_tokens=found.prefill_tokens,
            decode_kv_bytes=found.decode_kv_bytes + found.admitted_kv_bytes,
            horizon_s=found.horizon_s,
            prefill_tokens_per_s=found.tokens_per_s,
            kv_capacity_bytes=120e9,
        )
        return target_configuration(demand, len(instances))

    return {"forecast and allocation, 1,000 trajectories": best_s(run, number=1, repeats=repeats)}


def live_trajectories(count: int) -> WorkloadPredictor:
    """A predictor that saw `count` trajectories through a turn and has them now in every phase."""
    predictor = WorkloadPredictor()
    turn = (Phase.READY, Phase.PREFILL, Phase.DECODE)
    ways = (Phase.ENVIRONMENT_STARTING, *turn, Phase.TOOL, *turn)
    for i in range(2 * count):
        record = PhaseChange(
            trajectory=TrajectoryId(f"t{i:06d}"),
            group=GroupId(f"g{i // 32}"),
            phase=Phase.SAMPLED,
            at_s=900.0,
            task="swe",
        )
        predictor.observe(record)
        # The first half came all the way and teaches; of the second, each stopped somewhere else.
        for k, phase in enumerate(ways if i < count else ways[: 1 + i % len(ways)]):
            record = follow_up(
                record,
                phase,
                901.0 + 5.0 * k + 0.01 * (i % 97),
                prompt_tokens=1_000 + 300 * k + i % 500,
                instance=WorkerId(i % 64) if phase in (Phase.READY, Phase.PREFILL) else None,
                load=i % 40,
                tool=f"tool{i % 5}" if phase is Phase.TOOL else "",
            )
            predictor.observe(record)
        if i < count:
            predictor.observe(follow_up(record, Phase.FAILED, 950.0))
    return predictor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50, help="rounds of each measurement (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, seconds")
    arguments = parser.parse_args()
    figures = {**decisions(arguments.repeats), **plans(arguments.repeats), **updates(arguments.repeats)}
    figures |= forecasts(arguments.repeats)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, seconds in figures.items():
        rate = f"   {1 / seconds:>12,.0f} /s" if name.startswith("table") else ""
        print(f"{name:<44} {seconds * 1e6:>10.1f} us{rate}")


if __name__ == "__main__":
    main()
