"""verl: Hydra overrides of a launch script, or a resolved YAML configuration."""

import math
import re

from pearl_rl.importing.result import Imported, Source, put_batch, put_lengths, put_model, put_pools
from pearl_rl.importing.shell import command_arguments
from pearl_rl.importing.tree import Flat

_ENTRY = re.compile(r"^verl\.|main_ppo|fully_async_main|^main_\w+\.py$")
_ROLLOUT = "actor_rollout_ref.rollout"
_SWITCH = "trainer.v1.separate_async.hybrid_rollout"

NO_COUNTERPART = {
    "async_training.dynamic_schedule": "PEARL decides by its own gate, eq. (7)",
    "async_training.partial_rollout": "PEARL always keeps partial responses",
    f"{_SWITCH}.": "PEARL decides by its own gate, eq. (7)",
    f"{_ROLLOUT}.gpu_memory_utilization": "PEARL is told the KV tokens of a worker: engine.kv_tokens",
    f"{_ROLLOUT}.standalone_gpu_memory_utilization": "PEARL is told the KV tokens of a worker: engine.kv_tokens",
    f"{_ROLLOUT}.disaggregation.": "PEARL derives transfer and ports from the runtime",
    "actor_rollout_ref.actor.megatron.": "PEARL trains with FSDP2",
    "actor_rollout_ref.actor.fsdp_config.": "PEARL shards over all training GPUs",
    "critic.": "GRPO has no critic",
}


def overrides(text: str) -> Flat:
    """`a.b=value` arguments of the training command in a launch script."""
    flat: Flat = {}
    for word in command_arguments(text, _ENTRY):
        key, equals, value = word.lstrip("+~").partition("=")
        if equals and not key.startswith("-"):
            flat[key] = None if value in ("null", "None", "~") else value
    return flat


def read(flat: Flat, model_path: str | None) -> Imported:
    """verl's keys into ours."""
    out = Imported("verl")
    source = Source(flat, out)
    put_model(out, source, "actor_rollout_ref.model.path", model_path)
    _cluster(out, source)
    _train(out, source)
    _rollout(out, source)
    source.name_the_rest(NO_COUNTERPART)
    return out


def _product(source: Source, first: str, second: str) -> int | None:
    one, two = source.whole(first), source.whole(second)
    return None if one is None or two is None else one * two


def _cluster(out: Imported, source: Source) -> None:
    size = source.whole(f"{_ROLLOUT}.tensor_model_parallel_size") or 1
    training = _product(source, "trainer.nnodes", "trainer.n_gpus_per_node")
    pool = "rollout" if source.has("rollout.n_gpus_per_node") else _ROLLOUT
    rollout = _product(source, f"{pool}.nnodes", f"{pool}.n_gpus_per_node")
    keys = "trainer.nnodes × n_gpus_per_node, rollout.nnodes × n_gpus_per_node, tensor_model_parallel_size"
    put_pools(out, training=training, rollout=rollout, shared=not rollout, size=size, keys=keys)
    lends = source.flag("async_training.use_dynamic_resource_scheduling") or source.flag(f"{_SWITCH}.enable_switch")
    if rollout:
        out.put("cluster.borrowing", "gated" if lends else "off", "use_dynamic_resource_scheduling or enable_switch")
    source.ignore("actor_rollout_ref.hybrid_engine", f"{_ROLLOUT}.mode", f"{_ROLLOUT}.name")
    if source.flag(f"{_ROLLOUT}.disaggregation.enabled"):
        prefill = source.whole(f"{_ROLLOUT}.disaggregation.prefill_replicas") or 1
        decode = source.whole(f"{_ROLLOUT}.disaggregation.decode_replicas") or 1
        out.put("planner.policy", "static_pd", f"{_ROLLOUT}.disaggregation.enabled")
        out.put("planner.configuration", f"{prefill}P{decode}D", f"{_ROLLOUT}.disaggregation.*_replicas")


def _train(out: Imported, source: Source) -> None:
    actor = "actor_rollout_ref.actor"
    mini = source.whole(f"{actor}.ppo_mini_batch_size")
    groups = source.whole("data.train_batch_size")
    cycle = source.whole("async_training.trigger_parameter_sync_step") or 1
    batches = source.whole("async_training.require_batches") or 1
    if not groups and mini:
        groups = mini * cycle * batches
    put_batch(
        out,
        groups=groups,
        group=source.whole(f"{_ROLLOUT}.n"),
        updates=groups // mini if groups and mini else None,
        keys="train_batch_size or ppo_mini_batch_size × require_batches × trigger_parameter_sync_step; rollout.n",
    )
    staleness = source.number("async_training.staleness_threshold")
    if staleness is not None:
        # Their share of samples that may be a weight version old; above 1 they may be older.
        out.put("train.max_staleness_versions", math.ceil(staleness), "async_training.staleness_threshold, rounded up")
    source.copy(f"{actor}.optim.lr", "train.learning_rate")
    source.copy(f"{actor}.optim.weight_decay", "train.weight_decay")
    source.copy(f"{actor}.optim.lr_warmup_steps", "train.warmup_updates", whole=True)
    source.copy(f"{actor}.clip_ratio_low", "train.clip_low")
    source.copy(f"{actor}.clip_ratio_high", "train.clip_high")
    source.copy(f"{actor}.grad_clip", "train.max_gradient_norm")
    source.copy(f"{actor}.entropy_coeff", "train.entropy_coefficient")
    source.copy(f"{actor}.ppo_epochs", "train.epochs", whole=True)
    source.copy(f"{actor}.ppo_max_token_len_per_gpu", "train.micro_batch_tokens", whole=True)
    kl = source.number(f"{actor}.kl_loss_coef")
    if source.flag(f"{actor}.use_kl_loss") and kl is not None:
        out.put("train.kl_coefficient", kl, f"{actor}.kl_loss_coef")
    estimator = source.text("algorithm.adv_estimator")
    if estimator not in (None, "grpo"):
        out.drop("algorithm.adv_estimator", f"'{estimator}' is not there; PEARL trains with grpo")
    steps = source.whole("trainer.total_training_steps")
    if steps:
        out.put("run.steps", steps, "trainer.total_training_steps")
    save = source.whole("trainer.save_freq")
    if save is not None:
        out.put("train.checkpoint_every_steps", max(0, save), "trainer.save_freq")


def _rollout(out: Imported, source: Source) -> None:
    prompt, response = source.whole("data.max_prompt_length"), source.whole("data.max_response_length")
    put_lengths(
        out,
        context=prompt + response if prompt and response else None,
        response=response,
        keys="data.max_prompt_length + data.max_response_length",
    )
    source.copy(f"{_ROLLOUT}.temperature", "rollout.temperature")
    source.copy(f"{_ROLLOUT}.top_p", "rollout.top_p")
    source.copy(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "rollout.max_turns", whole=True)
    source.ignore(f"{_ROLLOUT}.multi_turn.enable", f"{_ROLLOUT}.multi_turn.max_user_turns")
    source.ignore(f"{_ROLLOUT}.calculate_log_probs")
