"""ROLL: the YAML configuration of an agentic or RLVR pipeline."""

import math

from pearl_rl.importing.result import Imported, Source, put_batch, put_lengths, put_model, put_pools
from pearl_rl.importing.tree import Flat, devices

NO_COUNTERPART = {
    "actor_train.strategy_args.": "PEARL trains with FSDP2",
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": (
        "PEARL is told the KV tokens of a worker: engine.kv_tokens"
    ),
    "reference.": "the reference is the initial policy, on the training GPUs",
    "critic.": "GRPO has no critic",
    "custom_envs.": "name an environment: environment.name and environment.args",
    "train_env_manager.": "name an environment: environment.name and environment.args",
    "val_env_manager.": "PEARL has no validation environments",
}


def read(flat: Flat, model_path: str | None) -> Imported:
    """ROLL's keys into ours."""
    out = Imported("roll")
    source = Source(flat, out)
    put_model(out, source, "pretrain", model_path)
    source.ignore("reward_pretrain")
    _cluster(out, source)
    _train(out, source)
    context = source.whole("sequence_length")
    if context is None:
        prompt, response = source.whole("prompt_length"), source.whole("response_length")
        context = prompt + response if prompt and response else None
    key = "actor_infer.generating_args.max_new_tokens"
    response = source.whole(key) or source.whole("response_length")
    put_lengths(out, context=context, response=response, keys="sequence_length, max_new_tokens")
    source.copy("actor_infer.generating_args.temperature", "rollout.temperature")
    source.copy("actor_infer.generating_args.top_p", "rollout.top_p")
    source.copy("max_actions_per_traj", "rollout.max_turns", whole=True)
    source.name_the_rest(NO_COUNTERPART)
    return out


def _cluster(out: Imported, source: Source) -> None:
    train, infer = devices(source.get("actor_train.device_mapping")), devices(source.get("actor_infer.device_mapping"))
    size = source.whole("actor_infer.strategy_args.strategy_config.tensor_parallel_size") or 1
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
        keys="device_mapping of actor_train and actor_infer, tensor_parallel_size",
    )
    if own:
        out.put("cluster.borrowing", "gated" if overlap else "off", "whether the two device mappings overlap")


def _train(out: Imported, source: Source) -> None:
    batch = source.whole("rollout_batch_size")
    group = source.whole("train_env_manager.group_size") or source.whole("num_return_sequences_in_group")
    agentic = source.has("train_env_manager.group_size")
    if batch and group:
        # An agentic pipeline counts trajectories, an RLVR pipeline prompts.
        groups = max(1, batch // group) if agentic else batch
        put_batch(out, groups=groups, group=group, updates=None, keys="rollout_batch_size and the group size")
    ratio = source.number("async_generation_ratio")
    out.put(
        "train.max_staleness_versions",
        math.ceil(ratio) if ratio else 0,
        "async_generation_ratio, rounded up; 0 is sync",
    )
    source.copy("max_steps", "run.steps", whole=True)
    source.copy("seed", "run.seed", whole=True)
    source.copy("save_steps", "train.checkpoint_every_steps", whole=True)
    source.copy("ppo_epochs", "train.epochs", whole=True)
    source.copy("max_grad_norm", "train.max_gradient_norm")
    source.copy("entropy_loss_coef", "train.entropy_coefficient")
    source.copy("init_kl_coef", "train.kl_coefficient")
    source.copy("actor_train.training_args.learning_rate", "train.learning_rate")
    source.copy("actor_train.training_args.weight_decay", "train.weight_decay")
    source.copy("actor_train.training_args.warmup_steps", "train.warmup_updates", whole=True)
    clip = source.number("pg_clip")
    if clip is not None:
        out.put("train.clip_low", clip, "pg_clip")
        out.put("train.clip_high", clip, "pg_clip")
    estimator = source.text("adv_estimator")
    if estimator not in (None, "grpo"):
        out.drop("adv_estimator", f"'{estimator}' is not there; PEARL trains with grpo")
