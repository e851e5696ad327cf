"""What must hold of a run after every event, and at its end. Each failure is one line with the rule's name."""

from collections import Counter

from pearl_executor.testing.workers import next_token
from pearl_planner.elastic import ElasticState
from pearl_rl.journal.state_codec import check_parts
from pearl_rl.rollout.counts import BufferCounts
from pearl_state.effects import Effect, SyncWeights
from pearl_state.errors import StateError
from pearl_state.lifecycle import HOLDS_GPU, Lifecycle
from pearl_state.roles import Role, Zone
from pearl_state.table import WorkerTable
from pearl_state.trajectory import Trajectory
from pearl_state.worker import WorkerId


class BrokenInvariantError(AssertionError):
    """An invariant of the design does not hold."""


def require(holds: bool, rule: str, detail: str) -> None:
    if not holds:
        raise BrokenInvariantError(f"{rule}: {detail}")


def check_table(before: WorkerTable, after: WorkerTable) -> None:
    """The table's own rules, computed from its rows alone, and what may change from one event to the next."""
    holder: dict = {}
    serving: Counter = Counter()
    served = [before.rows[id_].weight_version for id_ in before.active()]
    newest = max(served, default=after.target_version)
    for id_, row in after.rows.items():
        if row.lifecycle in HOLDS_GPU:
            for gpu in row.gpus:
                require(gpu not in holder, "one_owner_per_gpu", f"GPU {gpu} is {holder.get(gpu)}'s and {id_}'s")
                holder[gpu] = id_
        if row.lifecycle is Lifecycle.ACTIVE and row.role is not Role.TRAINING:
            serving[row.role] += 1
            version = row.weight_version
            require(
                version is not None and after.floor_version <= version,
                "no_stale_serving",
                f"worker {id_} serves version {version}, floor {after.floor_version}, target {after.target_version}",
            )
            admitted = id_ not in before.active()
            require(
                not admitted or version == after.target_version or version >= newest,
                "admitted_up_to_date",
                f"worker {id_} is admitted with version {version}, target {after.target_version}, served {served}",
            )
        old = before.rows.get(id_)
        if old is not None and old.gpus != row.gpus:
            require(old.incarnation <= row.incarnation, "incarnation_grows", f"slot {id_} was bound anew")
        if old is not None:
            require(row.incarnation >= old.incarnation, "incarnation_grows", f"slot {id_}")
            require(
                (old.role is Role.TRAINING) is (row.role is Role.TRAINING), "fixed_binding", f"slot {id_} changed kind"
            )
    require(bool(serving[Role.PREFILL]) is bool(serving[Role.DECODE]), "paired_roles", f"{dict(serving)}")
    require(after.target_version >= before.target_version, "monotonic_versions", "the target went back")
    require(after.floor_version >= before.floor_version, "monotonic_versions", "the floor went back")
    require(after.version >= before.version, "serialized", "the table went back")


def check_following(table: WorkerTable, effects: tuple[Effect, ...], told: dict[tuple[WorkerId, int], int]) -> None:
    """Whoever serves older weights than the target was told to load it; `told` keeps who was, and is renewed here."""
    for effect in effects:
        if isinstance(effect, SyncWeights):
            told.update({(worker.id, worker.incarnation): effect.version for worker in effect.workers})
    for id_ in table.active():
        row = table.rows[id_]
        require(
            table.target_version in (row.weight_version, told.get((id_, row.incarnation))),
            "weights_follow",
            f"worker {id_} serves version {row.weight_version} and is told of no newer one than "
            f"{told.get((id_, row.incarnation))}, target {table.target_version}",
        )


def check_state(state: ElasticState) -> None:
    """Who may train, that nobody is named by two activities at once, and that a resume would take the state."""
    if state.training_running:
        lent = [
            row.id
            for row in state.table.rows.values()
            if row.zone is Zone.OVERLAP and row.role is not Role.TRAINING and row.holds_gpu
        ]
        require(not lent, "training_alone", f"training runs while {lent} hold its GPUs")
    busy = Counter(id_ for group in state.groups.values() for id_ in group.workers)
    busy.update(id_ for ids in state.removals.values() for id_ in ids)
    twice = [id_ for id_, count in busy.items() if count > 1]
    require(not twice, "one_activity", f"{twice} are named by two preparations or removals")
    try:
        check_parts(state)
    except (StateError, ValueError) as error:
        raise BrokenInvariantError(f"restorable: no resume takes a snapshot of this state: {error}") from None


def check_counts(counts: BufferCounts) -> None:
    """Every dispatched sample is accounted for."""
    require(counts.lost == 0, "nothing_lost", f"{counts.lost} samples are unaccounted for: {counts}")
    for name in ("in_flight", "buffered", "used", "rejected", "failed", "dropped", "cancelled"):
        require(getattr(counts, name) >= 0, "nothing_lost", f"{name} = {getattr(counts, name)}")


def check_tokens(trajectory: Trajectory, turns: int, new_tokens: int) -> None:
    """The fake engines continue any prefix in one way only: each response must be that, token for token."""
    require(len(trajectory.turns) == turns, "whole_trajectory", f"{trajectory.id} has {len(trajectory.turns)} turns")
    context: list[int] = []
    version = trajectory.dispatch_version
    for number, turn in enumerate(trajectory.turns):
        context += turn.prompt
        expected = []
        for _ in range(new_tokens):
            expected.append(next_token(context[-1], len(context)))
            context.append(expected[-1])
        require(
            list(turn.response) == expected,
            "no_token_twice",
            f"{trajectory.id} turn {number}: {list(turn.response)}, must be {expected}",
        )
        require(len(turn.logprobs) == len(turn.response), "whole_trajectory", f"{trajectory.id}: log-probabilities")
        for span in turn.spans:
            require(span.version >= version, "monotonic_versions", f"{trajectory.id}: spans {turn.spans}")
            version = span.version
