"""AReaL: the YAML configuration of an experiment."""

from pearl_rl.exporting.result import Exported, check_batch, copied, held, model_path, yaml_text
from pearl_rl.settings.root import Settings


def mapped(settings: Settings) -> Exported:
    """Our settings as AReaL's keys."""
    out = Exported("areal")
    cluster, train = settings.cluster, settings.train
    model_path(out, settings, "actor.path")
    size = cluster.gpus_per_worker
    serving = cluster.reserved_rollout_gpus // size
    out.put(
        "rollout.backend", f"sglang:d{serving}p1t{size}", "cluster.reserved_rollout_gpus", "cluster.gpus_per_worker"
    )
    out.put("actor.backend", f"fsdp:d{cluster.training_gpus}p1t1", "cluster.training_gpus")
    if cluster.borrowing != "off":
        out.drop("cluster.borrowing", "AReaL does not lend training GPUs to rollout")
    if held(out, settings) is not None:
        out.drop("planner.configuration", "AReaL's engines are colocated")
        out.drop("planner.policy", "AReaL's engines are colocated")
    check_batch(out, settings)
    pairs = [
        ("train.groups_per_step", "train_dataset.batch_size"),
        ("train.group_size", "gconfig.n_samples"),
        ("train.minibatches", "actor.ppo_n_minibatches"),
        ("model.max_context_tokens", "gconfig.max_tokens"),
        ("rollout.max_new_tokens", "gconfig.max_new_tokens"),
        ("rollout.temperature", "gconfig.temperature"),
        ("rollout.top_p", "gconfig.top_p"),
        ("rollout.max_turns", "econfig.max_steps"),
        ("train.max_staleness_versions", "rollout.max_head_offpolicyness"),
        ("train.learning_rate", "actor.optimizer.lr"),
        ("train.weight_decay", "actor.optimizer.weight_decay"),
        ("train.max_gradient_norm", "actor.optimizer.gradient_clipping"),
        ("train.clip_low", "actor.eps_clip"),
        ("train.clip_high", "actor.eps_clip_higher"),
        ("train.micro_batch_tokens", "actor.mb_spec.max_tokens_per_mb"),
        ("run.steps", "total_train_steps"),
        ("run.seed", "seed"),
        ("train.checkpoint_every_steps", "saver.freq_steps"),
    ]
    copied(out, settings, pairs)
    # Left out, it would be 0.1 there, and in the reward.
    out.put("actor.kl_ctl", 0.0)
    if train.kl_coefficient:
        out.drop("train.kl_coefficient", "AReaL has the KL in the reward: actor.kl_ctl")
    if train.aggregation != "token_mean":
        out.drop("train.aggregation", "AReaL weighs tokens alike")
    return out


def text(out: Exported, source: str) -> str:
    """A YAML document."""
    return yaml_text(out, f"# From {source}, by pearl-rl export areal.\n")
