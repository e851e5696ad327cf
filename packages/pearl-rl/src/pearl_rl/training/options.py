"""What training can be told: advantages, loss, optimizer, batching. Plain values that travel to the ranks as JSON."""

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class OptionError(ValueError):
    """An option outside its range: which, which value, which rule."""


class Baseline(StrEnum):
    """How a group's rewards become advantages."""

    MEAN_STD = "mean_std"
    """(reward − mean) / (std + ε): GRPO as published."""
    MEAN = "mean"
    """reward − mean: keeps hard and easy groups in proportion (Dr. GRPO)."""
    NONE = "none"
    """The reward itself (REINFORCE)."""


class Aggregation(StrEnum):
    """How token losses become one loss."""

    TOKEN_MEAN = "token_mean"
    """Mean over all generated tokens of the mini-batch: each token weighs the same."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over sequences of the mean over their generated tokens: each trajectory weighs the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The GRPO objective."""

    baseline: Baseline = Baseline.MEAN_STD
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    truncation: float = 2.0
    """C: importance weights exp(new − behaviour) count as at most this much."""
    clip_low: float | None = None
    """ε below 1 of a PPO-style clip on the importance weight; None with `clip_high` None means no clip."""
    clip_high: float | None = None
    """ε above 1 of the clip."""
    kl_coefficient: float = 0.0
    """Weight of the KL divergence to the initial model (k3 estimator); 0 keeps no reference model."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    temperature: float = 1.0
    """Sampling temperature of the behaviour policy; recorded log-probabilities are of the tempered distribution."""

    def __post_init__(self) -> None:
        _require("truncation", self.truncation, self.truncation >= 1, "at least 1")
        _require("temperature", self.temperature, self.temperature > 0, "greater than 0")
        _require("kl_coefficient", self.kl_coefficient, self.kl_coefficient >= 0, "at least 0")
        if (self.clip_low is None) != (self.clip_high is None):
            raise OptionError("clip_low and clip_high must be set together; set both, or neither")
        if self.clip_low is not None and self.clip_high is not None:
            _require("clip_low", self.clip_low, 0 <= self.clip_low <= 1, "from 0 to 1")
            _require("clip_high", self.clip_high, self.clip_high >= 0, "at least 0")

    @property
    def clips(self) -> bool:
        """Whether the importance weight is clipped as in PPO."""
        return self.clip_low is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """AdamW with linear warm-up to a constant learning rate."""

    learning_rate: float = 1e-3
    """0 is allowed: everything runs and nothing changes."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    warmup_updates: int = 0
    """Optimizer steps over which the learning rate rises linearly to `learning_rate`."""

    def __post_init__(self) -> None:
        _require("learning_rate", self.learning_rate, self.learning_rate >= 0, "at least 0")
        _require("max_gradient_norm", self.max_gradient_norm, self.max_gradient_norm > 0, "greater than 0")
        _require("warmup_updates", self.warmup_updates, self.warmup_updates >= 0, "at least 0")

    def learning_rate_at(self, optimizer_step: int) -> float:
        """Learning rate of the optimizer step with this number, counted from 0."""
        if optimizer_step >= self.warmup_updates:
            return self.learning_rate
        return self.learning_rate * (optimizer_step + 1) / self.warmup_updates


class RefActor(StrEnum):
    """Where the reference of the KL term works (TideRL section 5.1)."""

    INLINE = "inline"
    """On the actor's rank, between its forward and its backward; both models stay on the device."""
    COLOCATED = "colocated"
    """On the actor's rank, for all micro-batches under one swap of the models."""
    DECOUPLED = "decoupled"
    """On a rank of its own, while the actors work."""


class ComputeDtype(StrEnum):
    """Number format of forward, backward and published weights; master weights and AdamW state are float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Everything that the ranks need beyond the model's path."""

    loss: LossOptions = field(default_factory=LossOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    minibatches: int = 1
    """Parts that a batch is split into (whole groups), one optimizer step each."""
    epochs: int = 1
    """Passes over the batch."""
    micro_batch_tokens: int = 8192
    """Most padded tokens that one rank forwards at once; a longer sequence goes alone."""
    ref_actor: RefActor = RefActor.INLINE
    """Where the reference works; only with a KL term."""
    reference_rank: bool = False
    """Whether the last rank holds the reference alone; decoupled mode needs it."""
    dtype: ComputeDtype = ComputeDtype.FLOAT32
    device: str = "cpu"
    """`cpu` (gloo) or `cuda` (NCCL, one device a rank)."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require("minibatches", self.minibatches, self.minibatches >= 1, "at least 1")
        _require("epochs", self.epochs, self.epochs >= 1, "at least 1")
        _require("micro_batch_tokens", self.micro_batch_tokens, self.micro_batch_tokens >= 1, "at least 1")
        if self.ref_actor is RefActor.DECOUPLED and not self.reference_rank:
            raise OptionError("ref_actor is 'decoupled'; it needs reference_rank = true")
        if self.reference_rank and self.loss.kl_coefficient == 0:
            raise OptionError("reference_rank is true; it needs a kl_coefficient above 0")
        if self.device not in ("cpu", "cuda"):
            raise OptionError(f"device is {self.device!r}; it must be 'cpu' or 'cuda'")

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> "TrainerOptions":
        """Read what `to_json` wrote. Raises `OptionError` for values out of range, TypeError for unknown keys."""
        rest = dict(value)
        loss = dict(rest.pop("loss", {}))
        if "baseline" in loss:
            loss["baseline"] = Baseline(loss["baseline"])
        if "aggregation" in loss:
            loss["aggregation"] = Aggregation(loss["aggregation"])
        if "dtype" in rest:
            rest["dtype"] = ComputeDtype(rest["dtype"])
        if "ref_actor" in rest:
            rest["ref_actor"] = RefActor(rest["ref_actor"])
        optimizer = OptimizerOptions(**rest.pop("optimizer", {}))
        return TrainerOptions(loss=LossOptions(**loss), optimizer=optimizer, **rest)


def _require(name: str, value: float, holds: bool, rule: str) -> None:
    if not holds or not math.isfinite(value):
        raise OptionError(f"{name} is {value}; it must be {rule}")
