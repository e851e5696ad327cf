"""What an update gives back, and how the ranks' sums become its measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pearl_executor.ports import WeightSnapshot
from pearl_rl.training.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """What an update measured, over all ranks. Means are over generated tokens, of the whole update."""

    loss: float
    gradient_norm: float
    """Before clipping, of the last optimizer step; −1 where it was not finite."""
    entropy: float
    """Mean entropy of the sampled distributions, nats."""
    kl: float
    """KL to the initial model (k3); 0 without a KL term."""
    drift: float
    """KL to the behaviour policy (k3): how far off-policy the batch was."""
    importance_mean: float
    limited_fraction: float
    """Tokens whose importance weight was truncated or clipped."""
    learning_rate: float
    optimizer_steps: int
    """Since the beginning of training."""
    skipped_steps: int
    """Optimizer steps of this update whose gradient was not finite: they changed nothing."""
    trained_tokens: int
    """Tokens that the update saw, prompts included, counted once however many epochs."""
    response_tokens: int
    padding_fraction: float
    """Part of the computed tokens that were padding."""
    staleness_mean: float
    staleness_max: int
    token_age_mean: float
    """Mean age of the generated tokens, in versions since the weights that drew them."""
    compute_s: float
    """What the update itself took, seconds; the rest of its duration is the emulated device's."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank did in an update, seconds."""

    update_s: float = 0.0
    """All of it, from the first forward to the last optimizer step; 0 of a rank that holds the reference alone."""
    scoring_s: float = 0.0
    """Forward of the reference."""
    asking_s: float = 0.0
    """Part of `update_s` in which the actor had to wait for the reference: its scoring, swaps, or another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One update: new weights under a higher version."""

    version: int
    snapshot_path: Path
    """Folder in Hugging Face form. Copy it or publish it before the update after next."""
    snapshot_bytes: int
    checksum: str
    metrics: UpdateMetrics
    duration_s: float
    times: tuple[RankTimes, ...] = ()
    """By rank, where the trainer measures them."""

    @property
    def snapshot(self) -> WeightSnapshot:
        """By reference, as the weight store takes it."""
        return WeightSnapshot(self.version, str(self.snapshot_path), self.snapshot_bytes, self.checksum)


def combine_sums(
    batch: TrainBatch, ranks: Sequence[Mapping[str, float]], epochs: int, compute_s: float
) -> UpdateMetrics:
    """Add up what each rank returned from `FsdpTrainer.update`."""

    def total(name: str) -> float:
        return sum(rank[name] for rank in ranks)

    tokens = max(1.0, total("tokens"))
    padding = total("padding")
    return UpdateMetrics(
        loss=total("loss"),
        gradient_norm=ranks[0]["gradient_norm"],
        entropy=total("entropy_sum") / tokens,
        kl=total("kl_sum") / tokens,
        drift=total("drift_sum") / tokens,
        importance_mean=total("importance_sum") / tokens,
        limited_fraction=total("limited") / tokens,
        learning_rate=ranks[0]["learning_rate"],
        optimizer_steps=int(ranks[0]["optimizer_steps"]),
        skipped_steps=int(ranks[0]["skipped_steps"]),
        trained_tokens=batch.tokens,
        response_tokens=batch.response_tokens,
        padding_fraction=padding / max(1.0, batch.tokens * epochs + padding),
        staleness_mean=batch.staleness_mean,
        staleness_max=batch.staleness_max,
        token_age_mean=batch.token_age_mean,
        compute_s=compute_s,
    )
