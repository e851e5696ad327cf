"""From finished trajectories to what each rank trains on. Plain Python: building a batch needs no torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pearl_rl.training.options import Aggregation, Baseline
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, WeightSpan

STD_EPSILON = 1e-6


class BatchError(ValueError):
    """Trajectories that cannot be trained on: which one, and which rule it breaks."""


class StalenessError(BatchError):
    """A trajectory older than the bound allows, or newer than the trainer itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One trajectory as a row of tokens; `tokens`, `mask` and `logprobs` have the same length T."""

    trajectory: TrajectoryId
    group: GroupId
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    """Which tokens the policy generated; prompts and observations are False and carry no loss."""
    logprobs: tuple[float, ...]
    """Behaviour log-probability of each generated token, 0 elsewhere."""
    spans: tuple[WeightSpan, ...]
    reward: float
    advantage: float
    staleness: int
    """Trainer's version at use − version at dispatch."""

    @property
    def response_tokens(self) -> int:
        """How many tokens carry loss."""
        return sum(self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one update trains on."""

    version: int
    """The trainer's weight version when the batch was built: staleness is counted to here."""
    sequences: tuple[TrainSequence, ...]

    @property
    def tokens(self) -> int:
        """All tokens that the update sees, prompts included."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def response_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(sequence.response_tokens for sequence in self.sequences)

    @property
    def staleness_mean(self) -> float:
        """Mean age of the trajectories, in versions since their dispatch."""
        return _mean([sequence.staleness for sequence in self.sequences])

    @property
    def staleness_max(self) -> int:
        """Age of the oldest trajectory."""
        return max((sequence.staleness for sequence in self.sequences), default=0)

    @property
    def token_age_mean(self) -> float:
        """Mean age of the generated tokens, in versions since the weights that drew them."""
        tokens = sum(span.tokens for sequence in self.sequences for span in sequence.spans)
        aged = sum(span.tokens * (self.version - span.version) for s in self.sequences for span in s.spans)
        return aged / tokens if tokens else 0.0

    @staticmethod
    def build(
        trajectories: Sequence[Trajectory],
        version: int,
        baseline: Baseline = Baseline.MEAN_STD,
        max_staleness: int | None = None,
    ) -> "TrainBatch":
        """Lay trajectories out as rows and give each its group's advantage.

        `version` is the trainer's now. Raises `StalenessError` for a trajectory beyond `max_staleness` or from a
        version that the trainer has not reached, `BatchError` for one whose parts do not fit together.
        """
        if not trajectories:
            raise BatchError("a batch needs at least one trajectory")
        for trajectory in trajectories:
            _check_age(trajectory, version, max_staleness)
        rewards = [(trajectory.group, trajectory.reward) for trajectory in trajectories]
        advantages = group_advantages(rewards, baseline)
        rows = [_row(t, advantage, version) for t, advantage in zip(trajectories, advantages, strict=True)]
        return TrainBatch(version=version, sequences=tuple(rows))


def group_advantages(rewards: Sequence[tuple[GroupId, float]], baseline: Baseline) -> list[float]:
    """Advantage of each (group, reward) in the order given.

    A group of one, or with equal rewards, says nothing about which answer was better: its advantages are 0 under
    both group baselines. The standard deviation is the population's.
    """
    members: dict[GroupId, list[float]] = {}
    for group, reward in rewards:
        if not math.isfinite(reward):
            raise BatchError(f"reward of a trajectory in group {group} is {reward}; rewards must be finite")
        members.setdefault(group, []).append(reward)
    if baseline is Baseline.NONE:
        return [reward for _, reward in rewards]
    mean = {group: _mean(values) for group, values in members.items()}
    if baseline is Baseline.MEAN:
        return [reward - mean[group] for group, reward in rewards]
    std = {g: math.sqrt(_mean([(value - mean[g]) ** 2 for value in values])) for g, values in members.items()}
    return [(reward - mean[group]) / (std[group] + STD_EPSILON) for group, reward in rewards]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that one rank forwards together, by index into the batch; empty where others have more to do."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step: for each rank its micro-batches, the same number on every rank."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    row_weights: tuple[tuple[int, float], ...]
    """(row, weight of each of its generated tokens in the loss); over all ranks they add up to 1."""


def plan_update(
    batch: TrainBatch, ranks: int, minibatches: int, micro_batch_tokens: int, aggregation: Aggregation
) -> tuple[MiniBatch, ...]:
    """Split a batch into optimizer steps and balance each over the ranks by tokens.

    Groups stay whole, in the order of their first row; rows go longest first to the rank with the fewest tokens.
    Fewer groups than `minibatches` give fewer steps.
    """
    groups: dict[GroupId, list[int]] = {}
    for row, sequence in enumerate(batch.sequences):
        groups.setdefault(sequence.group, []).append(row)
    parts: list[list[int]] = [[] for _ in range(min(minibatches, len(groups)))]
    for number, rows in enumerate(groups.values()):
        parts[number % len(parts)].extend(rows)
    return tuple(_plan_step(batch, rows, ranks, micro_batch_tokens, aggregation) for rows in parts)


def _plan_step(
    batch: TrainBatch, rows: Sequence[int], ranks: int, micro_batch_tokens: int, aggregation: Aggregation
) -> MiniBatch:
    length = {row: len(batch.sequences[row].tokens) for row in rows}
    longest_first = sorted(rows, key=lambda row: (-length[row], row))
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for row in longest_first:
        rank = min(range(ranks), key=lambda r: (load[r], r))
        of_rank[rank].append(row)
        load[rank] += length[row]
    packed = [_pack(share, length, micro_batch_tokens) for share in of_rank]
    most = max(len(share) for share in packed)
    # Collectives are counted: a rank with less to do forwards empty micro-batches.
    even = tuple(tuple(share + [MicroBatch(())] * (most - len(share))) for share in packed)
    return MiniBatch(even, tuple(_row_weights(batch, rows, aggregation)))


def _pack(rows: Sequence[int], length: dict[int, int], micro_batch_tokens: int) -> list[MicroBatch]:
    """Put neighbours in length together while rows × longest stays within the limit. `rows` come longest first."""
    packed: list[MicroBatch] = []
    current: list[int] = []
    for row in rows:
        if current and length[current[0]] * (len(current) + 1) > micro_batch_tokens:
            packed.append(MicroBatch(tuple(current)))
            current = []
        current.append(row)
    if current:
        packed.append(MicroBatch(tuple(current)))
    return packed


def _row_weights(batch: TrainBatch, rows: Sequence[int], aggregation: Aggregation) -> Iterable[tuple[int, float]]:
    counts = {row: batch.sequences[row].response_tokens for row in rows}
    total = sum(counts.values())
    filled = sum(1 for count in counts.values() if count)
    for row, count in counts.items():
        if count == 0:
            yield row, 0.0
        elif aggregation is Aggregation.TOKEN_MEAN:
            yield row, 1.0 / total
        else:
            yield row, 1.0 / (filled * count)


def _check_age(trajectory: Trajectory, version: int, max_staleness: int | None) -> None:
    staleness = version - trajectory.dispatch_version
    newest = max((span.version for span in trajectory.spans), default=trajectory.dispatch_version)
    if staleness < 0 or newest > version:
        raise StalenessError(
            f"trajectory {trajectory.id} has tokens of version {max(newest, trajectory.dispatch_version)}, the trainer "
            f"is at {version}: versions went back; resume from the newest checkpoint with the journal's version"
        )
    if max_staleness is not None and staleness > max_staleness:
        raise StalenessError(
            f"trajectory {trajectory.id} was dispatched at version {trajectory.dispatch_version} and would be used at "
            f"{version}: staleness {staleness} exceeds the bound {max_staleness}"
        )


def _row(trajectory: Trajectory, advantage: float, version: int) -> TrainSequence:
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for number, turn in enumerate(trajectory.turns):
        if len(turn.logprobs) != len(turn.response):
            raise BatchError(
                f"turn {number} of trajectory {trajectory.id} has {len(turn.response)} response tokens and "
                f"{len(turn.logprobs)} log-probabilities; they must be as many"
            )
        if not all(math.isfinite(value) for value in turn.logprobs):
            raise BatchError(f"turn {number} of trajectory {trajectory.id} has a log-probability that is not finite")
        tokens += [*turn.prompt, *turn.response]
        mask += [False] * len(turn.prompt) + [True] * len(turn.response)
        logprobs += [0.0] * len(turn.prompt) + list(turn.logprobs)
    if mask and mask[0]:
        raise BatchError(f"trajectory {trajectory.id} begins with a generated token; a prompt must come first")
    return TrainSequence(
        trajectory=trajectory.id,
        group=trajectory.group,
        tokens=tuple(tokens),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        spans=trajectory.spans,
        reward=trajectory.reward,
        advantage=advantage,
        staleness=version - trajectory.dispatch_version,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
