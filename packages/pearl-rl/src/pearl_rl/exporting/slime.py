"""slime: a launch script with the flags of its asynchronous trainer."""

import shlex

from pearl_rl.exporting.result import Exported, check_batch, copied, held, mini_batch, model_path, nodes_of
from pearl_rl.settings.root import Settings


def mapped(settings: Settings) -> Exported:
    """Our settings as slime's flags. Raises `SettingsError`."""
    out = Exported("slime")
    cluster, train = settings.cluster, settings.train
    model_path(out, settings, "hf-checkpoint")
    nodes, each = nodes_of(cluster.training_gpus)
    out.put("actor-num-nodes", nodes, "cluster.training_gpus")
    out.put("actor-num-gpus-per-node", each, "cluster.training_gpus")
    out.put("rollout-num-gpus", cluster.reserved_rollout_gpus, "cluster.reserved_rollout_gpus")
    out.put("rollout-num-gpus-per-engine", cluster.gpus_per_worker, "cluster.gpus_per_worker")
    if cluster.borrowing != "off":
        out.drop("cluster.borrowing", "slime does not lend training GPUs to rollout")
    chosen = held(out, settings)
    if chosen is not None:
        if chosen.workers != cluster.reserved_rollout_gpus // cluster.gpus_per_worker:
            out.note("planner.configuration", f"slime's decode servers are what {chosen.prefill} prefill servers leave")
        out.put("prefill-num-servers", chosen.prefill, "planner.policy", "planner.configuration")
    out.put("rollout-batch-size", train.groups_per_step, "train.groups_per_step")
    out.put("n-samples-per-prompt", train.group_size, "train.group_size")
    size = mini_batch(out, settings) * train.group_size
    out.put("global-batch-size", size, "train.groups_per_step", "train.group_size", "train.minibatches")
    check_batch(out, settings)
    if train.max_staleness_versions != 1:
        out.drop("train.max_staleness_versions", "slime's asynchronous trainer is one rollout ahead")
    pairs = [
        ("model.max_context_tokens", "rollout-max-context-len"),
        ("rollout.max_new_tokens", "rollout-max-response-len"),
        ("rollout.temperature", "rollout-temperature"),
        ("rollout.top_p", "rollout-top-p"),
        ("run.steps", "num-rollout"),
        ("train.learning_rate", "lr"),
        ("train.weight_decay", "weight-decay"),
        ("train.max_gradient_norm", "clip-grad"),
        ("train.clip_low", "eps-clip"),
        ("train.clip_high", "eps-clip-high"),
        ("train.entropy_coefficient", "entropy-coef"),
        ("train.micro_batch_tokens", "max-tokens-per-gpu"),
        ("train.checkpoint_every_steps", "save-interval"),
        ("train.algorithm", "advantage-estimator"),
        ("run.seed", "seed"),
    ]
    copied(out, settings, pairs)
    out.put("use-dynamic-batch-size", True, "train.micro_batch_tokens")
    if train.aggregation == "token_mean":
        out.put("calculate-per-token-loss", True, "train.aggregation")
    if train.baseline == "mean":
        out.put("disable-grpo-std-normalization", True, "train.baseline")
    out.told.update({"train.aggregation"} | ({"train.baseline"} if train.baseline != "none" else set()))
    if train.kl_coefficient > 0:
        out.put("use-kl-loss", True, "train.kl_coefficient")
        out.put("kl-loss-coef", train.kl_coefficient, "train.kl_coefficient")
    return out


def text(out: Exported, source: str) -> str:
    """A launch script."""
    words = [f"--{key}" if value is True else f"--{key} {shlex.quote(str(value))}" for key, value in out.values.items()]
    head = f"#!/usr/bin/env bash\n# From {source}, by pearl-rl export slime.\nset -euo pipefail\n\n"
    return head + " \\\n    ".join(["python3 train_async.py", *words, '"$@"']) + "\n"
