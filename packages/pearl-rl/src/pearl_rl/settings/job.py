"""Settings of the job itself: the run, the model, training, rollout, and the environment.

Fields have no defaults here: `default.toml` beside this module is the one place that holds them.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Scalar = bool | int | float | str


class Section(BaseModel):
    """A table of the configuration file. Immutable; unknown keys, NaN, infinities and type coercions are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSettings(Section):
    """`[run]`: how long, from which seed, and where the run folder goes."""

    seed: int = Field(ge=0, lt=2**32, description="seed of everything random: tasks, sampling, initial weights")
    steps: int = Field(ge=1, le=10_000_000, description="training steps to make")
    wall_limit_s: float = Field(gt=0, description="end the run in order after this time, seconds (exit code 4)")
    dir: str = Field(min_length=1, description="folder in which each run makes its own folder; --run-dir names it")
    resume_from: str = Field(description="run folder or checkpoint to continue from; empty for a fresh start")


class TinyModelSettings(Section):
    """`[model.tiny]`: shape of the Qwen3 model that is built from scratch when `model.path` is "tiny"."""

    hidden_size: int = Field(ge=8, le=65_536, description="width of the residual stream")
    layers: int = Field(ge=1, le=1_000, description="transformer layers")
    heads: int = Field(ge=1, le=1_024, description="attention heads")
    kv_heads: int = Field(ge=1, le=1_024, description="key/value heads; divides heads")
    head_dim: int = Field(ge=2, le=1_024, multiple_of=2, description="width of one attention head; even")
    intermediate_size: int = Field(ge=8, le=1_000_000, description="width of the gated feed-forward layer")
    warm_up_steps: int = Field(ge=0, description="supervised updates on valid syntax before training; 0 for none")
    warm_up_demonstrations: int = Field(ge=1, le=1_000_000, description="transcripts that the warm-up copies")
    warm_up_batch: int = Field(ge=1, le=100_000, description="demonstrations of one warm-up update")
    warm_up_learning_rate: float = Field(gt=0, le=1, description="learning rate of the warm-up")
    warm_up_observation_weight: float = Field(
        ge=0, description="weight of observation tokens in the warm-up's loss beside 1 for response tokens"
    )


class ModelSettings(Section):
    """`[model]`: what is trained."""

    path: str = Field(min_length=1, description='folder of a Hugging Face causal LM, or "tiny" to build one')
    max_context_tokens: int = Field(ge=16, le=10_000_000, description="longest context of a trajectory, tokens")
    dtype: Literal["float32", "bfloat16"] = Field(
        description="number format of passes, published weights and KV; training keeps its own weights in float32, and "
        "the embedded engine computes in it on a CPU"
    )
    tiny: TinyModelSettings = Field(description='shape of the model that path = "tiny" builds')


class TrainSettings(Section):
    """`[train]`: the update."""

    algorithm: Literal["grpo"] = Field(description="policy-gradient algorithm")
    learning_rate: float = Field(ge=0, le=1, description="AdamW learning rate; 0 trains nothing (a control run)")
    weight_decay: float = Field(ge=0, le=1, description="AdamW weight decay")
    warmup_updates: int = Field(ge=0, description="optimizer updates over which the learning rate rises from 0")
    max_gradient_norm: float = Field(gt=0, description="gradients are scaled down to this norm")
    group_size: int = Field(ge=2, le=100_000, description="trajectories of one task that are compared (a GRPO group)")
    groups_per_step: int = Field(ge=1, le=100_000, description="groups that one step trains on")
    minibatches: int = Field(ge=1, le=100_000, description="parts of a step's batch, one optimizer update each")
    epochs: int = Field(ge=1, le=1_000, description="passes over a step's batch")
    micro_batch_tokens: int = Field(ge=16, description="most padded tokens that one rank forwards at once")
    baseline: Literal["mean_std", "mean", "none"] = Field(
        description="advantage: reward less the group's mean, over its deviation; less the mean; or the reward itself"
    )
    aggregation: Literal["token_mean", "sequence_mean"] = Field(
        description="what weighs the same: tokens or trajectories"
    )
    importance_truncation: float = Field(
        ge=1, description="most that the importance weight of trainer over rollout log-probabilities counts"
    )
    clip: bool = Field(description="clip the importance weight as PPO does, to 1 - clip_low .. 1 + clip_high")
    clip_low: float = Field(ge=0, le=1, description="clip below 1")
    clip_high: float = Field(ge=0, description="clip above 1")
    kl_coefficient: float = Field(
        ge=0, description="weight of the KL penalty to the initial policy; 0 keeps no reference"
    )
    ref_actor: Literal["inline", "colocated", "decoupled", "auto"] = Field(
        description="where the reference of the KL penalty works: between an actor's forward and backward with both "
        "models on the GPU, before all of them under one swap of the models, or on the last training GPU alone; auto: "
        "colocated or decoupled, whichever measured costs foretell to be faster"
    )
    entropy_coefficient: float = Field(ge=0, description="weight of the entropy bonus")
    max_staleness_versions: int = Field(
        ge=0, le=1_000, description="most weight versions between a trajectory's dispatch and its use"
    )
    threads: int = Field(ge=1, le=1_024, description="CPU threads of one training rank")
    checkpoint_every_steps: int = Field(ge=0, description="steps between checkpoints; 0 writes only the last one")
    keep_checkpoints: int = Field(ge=1, description="newest checkpoints that are kept")


class RolloutSettings(Section):
    """`[rollout]`: how trajectories are generated."""

    batch_size: int = Field(ge=1, le=10_000_000, description="trajectories of a step, B; groups_per_step × group_size")
    max_new_tokens: int = Field(ge=1, description="most tokens of one response")
    max_turns: int = Field(ge=1, le=100_000, description="most turns of a trajectory")
    temperature: float = Field(ge=0, le=100, description="sampling temperature; 0 is greedy and cannot train")
    top_p: float = Field(gt=0, le=1, description="nucleus sampling: smallest set of tokens with this probability")
    max_attempts: int = Field(
        ge=1, le=1_000, description="failing attempts without a new token after which a model call is given up"
    )
    max_refills: int = Field(ge=0, le=1_000_000, description="samples of a group that may fail and be played again")
    injection: Literal["auto", "batch", "continuous"] = Field(
        description="when groups are dispatched: a batch once the one before it is complete, or each as soon as "
        "max_staleness_versions allows; auto: continuous for policies with tiderl"
    )
    straggler_patience: float = Field(
        ge=0,
        description="with continuous injection: mean step times that an update waits for its oldest trajectories "
        "before it gives them up; 0 waits as long as needed",
    )
    task_batching: Literal["auto", "on", "off"] = Field(
        description="whether a turn waits until its trajectory may keep its KV on a worker; auto: for policies with "
        "tiderl"
    )
    kv_budget_fraction: float = Field(
        gt=0, le=1, description="with task batching: part of engine.kv_tokens that trajectories under way may hold"
    )


class EvaluationSettings(Section):
    """`[evaluation]`: episodes that train nobody, of one weight version, beside the training rollouts."""

    every_versions: int = Field(
        ge=0, description="weight versions from one evaluation to the next; 0 for none. The next weights wait for it"
    )
    episodes: int = Field(ge=1, le=1_000_000, description="tasks of one evaluation, the same each time")
    limit_s: float = Field(gt=0, description="an evaluation is cut off after this time, seconds")


class EnvironmentSettings(Section):
    """`[environment]`: what the model acts in."""

    name: str = Field(min_length=1, description="registered environment, or module:attribute of your own")
    args: dict[str, Scalar | list[Scalar]] = Field(description="arguments of this environment")
