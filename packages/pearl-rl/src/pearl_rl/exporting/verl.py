"""verl: a launch script of its fully asynchronous trainer, as Hydra overrides."""

import shlex

from pearl_rl.exporting.result import AGGREGATION, Exported, check_batch, copied, held, mini_batch, model_path, nodes_of
from pearl_rl.settings.root import Settings

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


def mapped(settings: Settings) -> Exported:
    """Our settings as verl's keys. Raises `SettingsError`."""
    out = Exported("verl")
    cluster, train = settings.cluster, settings.train
    model_path(out, settings, "actor_rollout_ref.model.path")
    for pool, gpus, key in (
        ("trainer", cluster.training_gpus, "cluster.training_gpus"),
        ("rollout", cluster.reserved_rollout_gpus, "cluster.reserved_rollout_gpus"),
    ):
        nodes, each = nodes_of(gpus)
        out.put(f"{pool}.nnodes", nodes, key)
        out.put(f"{pool}.n_gpus_per_node", each, key)
    out.put(f"{_ROLLOUT}.tensor_model_parallel_size", cluster.gpus_per_worker, "cluster.gpus_per_worker")
    lends = cluster.borrowing != "off"
    out.put("async_training.use_dynamic_resource_scheduling", lends, "cluster.borrowing")
    if lends:
        out.note(
            "cluster.borrowing", "verl decides by its own policy, unless integration/guests/verl_policy.py is used"
        )
    chosen = held(out, settings)
    if chosen is not None:
        ours = ("planner.policy", "planner.configuration")
        out.put(f"{_ROLLOUT}.disaggregation.enabled", True, *ours)
        out.put(f"{_ROLLOUT}.disaggregation.prefill_replicas", chosen.prefill, "planner.configuration")
        out.put(f"{_ROLLOUT}.disaggregation.decode_replicas", chosen.decode, "planner.configuration")
    out.put(f"{_ROLLOUT}.n", train.group_size, "train.group_size")
    out.put(f"{_ACTOR}.ppo_mini_batch_size", mini_batch(out, settings), "train.groups_per_step", "train.minibatches")
    out.put("async_training.trigger_parameter_sync_step", train.minibatches, "train.minibatches")
    check_batch(out, settings)
    prompt = settings.model.max_context_tokens - settings.rollout.max_new_tokens
    out.put("data.max_prompt_length", prompt, "model.max_context_tokens", "rollout.max_new_tokens")
    out.put("data.max_response_length", settings.rollout.max_new_tokens, "rollout.max_new_tokens")
    if settings.rollout.max_turns > 1:
        out.put(f"{_ROLLOUT}.multi_turn.enable", True, "rollout.max_turns")
        out.note(
            "rollout.max_new_tokens", "verl's max_response_length holds all turns of a trajectory; raise it for many"
        )
    pairs = [
        ("rollout.max_turns", f"{_ROLLOUT}.multi_turn.max_assistant_turns"),
        ("rollout.temperature", f"{_ROLLOUT}.temperature"),
        ("rollout.top_p", f"{_ROLLOUT}.top_p"),
        ("train.max_staleness_versions", "async_training.staleness_threshold"),
        ("train.learning_rate", f"{_ACTOR}.optim.lr"),
        ("train.weight_decay", f"{_ACTOR}.optim.weight_decay"),
        ("train.warmup_updates", f"{_ACTOR}.optim.lr_warmup_steps"),
        ("train.clip_low", f"{_ACTOR}.clip_ratio_low"),
        ("train.clip_high", f"{_ACTOR}.clip_ratio_high"),
        ("train.max_gradient_norm", f"{_ACTOR}.grad_clip"),
        ("train.entropy_coefficient", f"{_ACTOR}.entropy_coeff"),
        ("train.epochs", f"{_ACTOR}.ppo_epochs"),
        ("train.micro_batch_tokens", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
        ("train.algorithm", "algorithm.adv_estimator"),
        ("run.steps", "trainer.total_training_steps"),
        ("train.checkpoint_every_steps", "trainer.save_freq"),
    ]
    copied(out, settings, pairs)
    out.put(f"{_ACTOR}.loss_agg_mode", AGGREGATION[train.aggregation], "train.aggregation")
    if train.baseline != "none":
        out.put("algorithm.norm_adv_by_std_in_grpo", train.baseline == "mean_std", "train.baseline")
    out.put(f"{_ACTOR}.use_kl_loss", train.kl_coefficient > 0, "train.kl_coefficient")
    out.put(f"{_ACTOR}.kl_loss_coef", train.kl_coefficient, "train.kl_coefficient")
    return out


def text(out: Exported, source: str) -> str:
    """A launch script."""
    head = f"#!/usr/bin/env bash\n# From {source}, by pearl-rl export verl.\nset -euo pipefail\n\n"
    words = [f"{key}={value}" for key, value in out.values.items()]
    lines = ["python3 -m verl.experimental.fully_async_policy.fully_async_main", *map(shlex.quote, words), '"$@"']
    return head + " \\\n    ".join(lines) + "\n"
