"""ROLL: the YAML configuration of an agentic or RLVR pipeline."""

import math
from collections.abc import Mapping
from typing import Final

from pearl_rl.importing.result import (
    Imported,
    Scalar,
    Source,
    put_aggregation,
    put_batch,
    put_clip,
    put_engine,
    put_estimator,
    put_lengths,
    put_model,
    put_pools,
)
from pearl_rl.importing.tree import Flat, devices

_INFER = "actor_infer.strategy_args.strategy_config"
_TRAIN = "actor_train.training_args"
_ENVIRONMENT = "name an environment: environment.name and environment.args"
_REWARD = "rewards come from the environment: environment.name and environment.args"
_EVALUATION = "PEARL evaluates as it rolls out: evaluation.every_versions"
_LOSS = "PEARL has no such term or mask in its loss"

NO_COUNTERPART: Final = {
    "actor_train.strategy_args.": "PEARL trains with FSDP2",
    "actor_train.data_args.": _ENVIRONMENT,
    f"{_TRAIN}.": "AdamW with a constant rate after train.warmup_updates; micro-batches by train.micro_batch_tokens",
    "actor_train.": "PEARL trains with FSDP2",
    f"{_INFER}.": "PEARL starts its engines with its own options; SGLang's go into engine.sglang.extra_args",
    "actor_infer.generating_args.": "PEARL samples by rollout.temperature and rollout.top_p",
    "actor_infer.": "PEARL starts its engines with its own options",
    "reference.": "the reference is the initial policy, on the training GPUs",
    "enable_reference": "the reference is the initial policy, on the training GPUs",
    "critic": "GRPO has no critic",
    "value_clip": "GRPO has no critic",
    "teacher": "PEARL trains with grpo",
    "student_": "PEARL trains with grpo",
    "custom_envs": _ENVIRONMENT,
    "train_env_manager.": _ENVIRONMENT,
    "env_manager_cls": _ENVIRONMENT,
    "max_tokens_per_step": "set rollout.max_new_tokens",
    "val_env_manager.": "PEARL has no validation environments",
    "validation.": _EVALUATION,
    "val_": _EVALUATION,
    "eval_steps": _EVALUATION,
    "reward_normalization.": "PEARL takes each group's own baseline: train.baseline",
    "reward": _REWARD,
    "norm_": "PEARL takes each group's own baseline: train.baseline",
    "whiten_": "PEARL takes each group's own baseline: train.baseline",
    "init_kl_coef": "PEARL has the KL in the loss: train.kl_coefficient",
    "add_token_level_kl": "PEARL has the KL in the loss: train.kl_coefficient",
    "kl_": "PEARL has the KL in the loss: train.kl_coefficient",
    "target_kl": "PEARL has the KL in the loss: train.kl_coefficient",
    "pg_clip": "PEARL clips by train.clip_low and train.clip_high",
    "use_pg_clip_range": "PEARL clips by train.clip_low and train.clip_high",
    "pg_variant": "PEARL trains with grpo",
    "dual_clip_loss": _LOSS,
    "advantage_clip": _LOSS,
    "difficulty_": _LOSS,
    "length_loss_weight": _LOSS,
    "max_len_mask": _LOSS,
    "error_max_len_clip": _LOSS,
    "lambd": _LOSS,
    "gamma": _LOSS,
    "logging_": "see telemetry",
    "track": "see telemetry.sinks",
    "exp_name": "a name in ROLL's logs",
    "output_dir": "set run.dir",
    "checkpoint_config.": "set run.dir",
    "resume_from_checkpoint": "see pearl-rl resume",
    "system_envs.": "set them where the job is started",
    "render_save_dir": "set run.dir",
    "is_num_return_sequences_expand": "PEARL plays each trajectory of a group by itself",
    "batch_adjust_mode": "PEARL trains on every group",
    "offload_nccl": "PEARL releases memory where a GPU changes hands",
    "rpc_timeout": "see limits",
    "global_template": _ENVIRONMENT,
    "num_gpus_per_node": "PEARL places workers by itself",
    "hydra": "Hydra's own",
    "defaults": "other files are named there, which are not read: give the resolved configuration for what they hold",
}
"""Beginning of a key → why nothing of ours is like it; the first that fits."""

_DEFAULTS: Final[Mapping[str, Scalar]] = {
    "rollout_batch_size": 128,
    "num_return_sequences_in_group": 1,
    "max_steps": 500,
    "save_steps": 50,
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "entropy_loss_coef": 0.0,
    "kl_loss_coef": 0.0,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "loss_agg_mode": "seq-mean-token-mean",
    "adv_estimator": "gae",
    f"{_TRAIN}.learning_rate": 5e-5,
    f"{_TRAIN}.weight_decay": 0.0,
    f"{_TRAIN}.warmup_steps": 0,
    f"{_TRAIN}.per_device_train_batch_size": 8,
    f"{_TRAIN}.gradient_accumulation_steps": 1,
    "actor_infer.generating_args.temperature": 0.95,
    "actor_infer.generating_args.top_p": 0.7,
}
"""Of ROLL's configuration classes."""


def rolls_out(flat: Flat) -> bool:
    """Whether the job rolls out; fine-tuning, distillation and lists of environments do not."""
    return any(key.startswith(("actor_infer.", "actor_train.")) for key in flat)


def read(flat: Flat, model_path: str | None) -> Imported:
    """ROLL's keys into ours."""
    out = Imported("roll")
    source = Source(flat, out, _DEFAULTS)
    put_model(out, source, "pretrain", model_path)
    source.ignore("reward_pretrain")
    training = _cluster(out, source)
    _batch(out, source, training)
    _optimizer(out, source)
    _lengths(out, source)
    source.copy("actor_infer.generating_args.temperature", "rollout.temperature")
    source.copy("actor_infer.generating_args.top_p", "rollout.top_p")
    source.name_the_rest(NO_COUNTERPART)
    return out


def _cluster(out: Imported, source: Source) -> int:
    """Pools and engines. Returns how many GPUs train."""
    train, infer = devices(source.get("actor_train.device_mapping")), devices(source.get("actor_infer.device_mapping"))
    size = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size *= max(1, source.whole(f"{_INFER}.{name}", "cluster.gpus_per_worker") or 1)
    size = max(size, source.whole("actor_infer.num_gpus_per_worker", "cluster.gpus_per_worker") or 1)
    if train is None or infer is None:
        train = infer = infer or train or []
        out.drop("actor_train.device_mapping", "no list of GPUs; those of actor_infer are taken for both")
    overlap = set(train) & set(infer)
    own = len(set(infer) - overlap)
    put_pools(
        out,
        training=len(set(train)),
        rollout=own,
        shared=not own,
        size=size,
        keys="device_mapping of actor_train and actor_infer, sizes of an engine",
    )
    if own:
        lends = bool(overlap) and len(set(train)) % size == 0
        out.put("cluster.borrowing", "gated" if lends else "off", "whether the two device mappings overlap")
    sglang = source.has(f"{_INFER}.mem_fraction_static")
    put_engine(
        out,
        source,
        kind=source.text("actor_infer.strategy_args.strategy_name"),
        memory=f"{_INFER}.{'mem_fraction_static' if sglang else 'gpu_memory_utilization'}",
        running=f"{_INFER}.{'max_running_requests' if sglang else 'max_num_seqs'}",
        chunk=f"{_INFER}.{'chunked_prefill_size' if sglang else 'max_num_batched_tokens'}",
    )
    return len(set(train))


def _batch(out: Imported, source: Source, training: int) -> None:
    batch = source.whole("rollout_batch_size", "train.groups_per_step")
    agentic = source.has("train_env_manager.group_size")
    key = "train_env_manager.group_size" if agentic else "num_return_sequences_in_group"
    group = source.whole(key, "train.group_size")
    if batch and group and batch > 0:
        # An agentic pipeline counts trajectories, an RLVR pipeline prompts.
        groups = max(1, batch // group) if agentic else batch
        updates = _updates(source, groups * group, training)
        put_batch(out, groups=groups, group=group, updates=updates, keys="rollout_batch_size and the group size")
    ratio = source.number("async_generation_ratio", "train.max_staleness_versions")
    out.put(
        "train.max_staleness_versions",
        min(1_000, max(0, math.ceil(ratio))) if ratio else 0,
        "async_generation_ratio, rounded up; 0 is sync",
    )
    source.copy("max_steps", "run.steps", whole=True, least=1)
    source.copy("seed", "run.seed", whole=True)
    source.copy("save_steps", "train.checkpoint_every_steps", whole=True, least=0)


def _updates(source: Source, trajectories: int, training: int) -> int | None:
    """Optimizer updates of a step: ROLL counts rows of each rank and how often they add up."""
    rows, times = (
        source.whole(f"{_TRAIN}.{name}", "train.minibatches")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    split = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        split *= max(1, source.whole(f"actor_train.strategy_args.strategy_config.{name}") or 1)
    split *= max(1, source.whole("actor_train.model_args.ulysses_size") or 1)
    return None if not rows or not times else max(1, trajectories // (rows * times * max(1, training // split)))


def _optimizer(out: Imported, source: Source) -> None:
    source.copy("ppo_epochs", "train.epochs", whole=True)
    source.copy("max_grad_norm", "train.max_gradient_norm")
    source.copy("entropy_loss_coef", "train.entropy_coefficient", least=0)
    source.copy(f"{_TRAIN}.learning_rate", "train.learning_rate")
    source.copy(f"{_TRAIN}.weight_decay", "train.weight_decay")
    source.copy(f"{_TRAIN}.warmup_steps", "train.warmup_updates", whole=True, least=0)
    apart = source.flag("use_pg_clip_range")
    put_clip(source, low="pg_clip_low" if apart else "pg_clip", high="pg_clip_high" if apart else "pg_clip")
    put_aggregation(out, source, "loss_agg_mode")
    kl = source.number("kl_loss_coef", "train.kl_coefficient")
    if source.flag("use_kl_loss") and kl is not None:
        out.put("train.kl_coefficient", kl, source.origin("kl_loss_coef"))
    put_estimator(out, source, "adv_estimator")
    _baseline(out, source)


def _baseline(out: Imported, source: Source) -> None:
    key, method = "reward_normalization.method", source.text("reward_normalization.method")
    grouping = source.text("reward_normalization.grouping") or "batch"
    ours = {"mean_std": "mean_std", "mean": "mean", "identity": "none"}.get(method or "")
    if ours and (ours == "none" or grouping == "traj_group_id"):
        out.put("train.baseline", ours, f"{key} within {grouping}")
    elif method:
        shown = f"'{method[:40]}' over '{grouping[:40]}'"
        out.drop(key, f"{shown} is not there; PEARL takes each group's own baseline: train.baseline")


def _lengths(out: Imported, source: Source) -> None:
    context = source.whole("sequence_length", "model.max_context_tokens")
    prompt = source.whole("prompt_length", "model.max_context_tokens")
    response = source.whole("response_length", "rollout.max_new_tokens")
    if context is None:
        context = prompt + response if prompt and response else None
    key = "actor_infer.generating_args.max_new_tokens"
    each = source.whole(key, "rollout.max_new_tokens") or response
    if each is None and context and prompt:
        each = context - prompt
    put_lengths(out, context=context, response=each, keys="sequence_length, max_new_tokens")
    if source.has("max_actions_per_traj"):
        source.copy("max_actions_per_traj", "rollout.max_turns", whole=True, least=1)
    elif not source.has("train_env_manager.group_size"):
        out.put("rollout.max_turns", 1, "an RLVR pipeline answers once")
