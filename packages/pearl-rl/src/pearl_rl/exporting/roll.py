"""ROLL: the YAML configuration of an agentic pipeline."""

from pearl_rl.exporting.result import AGGREGATION, Exported, check_batch, copied, held, model_path, yaml_text
from pearl_rl.settings.root import Settings


def mapped(settings: Settings) -> Exported:
    """Our settings as ROLL's keys."""
    out = Exported("roll")
    cluster, train = settings.cluster, settings.train
    model_path(out, settings, "pretrain")
    training, reserved = cluster.training_gpus, cluster.reserved_rollout_gpus
    lends = cluster.borrowing != "off"
    ours = ("cluster.training_gpus", "cluster.reserved_rollout_gpus", "cluster.borrowing")
    out.put("actor_train.device_mapping", f"list(range(0,{training}))", "cluster.training_gpus")
    first = 0 if lends else training
    out.put("actor_infer.device_mapping", f"list(range({first},{training + reserved}))", *ours)
    size = "actor_infer.strategy_args.strategy_config.tensor_parallel_size"
    out.put(size, cluster.gpus_per_worker, "cluster.gpus_per_worker")
    if lends:
        out.note("cluster.borrowing", "ROLL lends at every step, unless integration/guests/roll_sampler.py is used")
    if held(out, settings) is not None:
        out.drop("planner.configuration", "ROLL's engines are colocated")
        out.drop("planner.policy", "ROLL's engines are colocated")
    batch = train.groups_per_step * train.group_size
    out.put("rollout_batch_size", batch, "train.groups_per_step", "train.group_size")
    out.put("train_env_manager.group_size", train.group_size, "train.group_size")
    check_batch(out, settings)
    if train.minibatches != 1:
        out.drop("train.minibatches", "set actor_train's batch sizes there")
    pairs = [
        ("model.max_context_tokens", "sequence_length"),
        ("rollout.max_new_tokens", "actor_infer.generating_args.max_new_tokens"),
        ("rollout.temperature", "actor_infer.generating_args.temperature"),
        ("rollout.top_p", "actor_infer.generating_args.top_p"),
        ("rollout.max_turns", "max_actions_per_traj"),
        ("train.max_staleness_versions", "async_generation_ratio"),
        ("run.steps", "max_steps"),
        ("run.seed", "seed"),
        ("train.checkpoint_every_steps", "save_steps"),
        ("train.epochs", "ppo_epochs"),
        ("train.max_gradient_norm", "max_grad_norm"),
        ("train.entropy_coefficient", "entropy_loss_coef"),
        ("train.kl_coefficient", "kl_loss_coef"),
        ("train.algorithm", "adv_estimator"),
        ("train.clip_low", "pg_clip_low"),
        ("train.clip_high", "pg_clip_high"),
        ("train.learning_rate", "actor_train.training_args.learning_rate"),
        ("train.weight_decay", "actor_train.training_args.weight_decay"),
        ("train.warmup_updates", "actor_train.training_args.warmup_steps"),
    ]
    copied(out, settings, pairs)
    out.put("use_kl_loss", train.kl_coefficient > 0, "train.kl_coefficient")
    out.put("use_pg_clip_range", True, "train.clip_low", "train.clip_high")
    method = {"mean_std": "mean_std", "mean": "mean", "none": "identity"}[train.baseline]
    out.put("reward_normalization.grouping", "traj_group_id")
    out.put("reward_normalization.method", method, "train.baseline")
    out.put("loss_agg_mode", AGGREGATION[train.aggregation], "train.aggregation")
    return out


def text(out: Exported, source: str) -> str:
    """A YAML document."""
    return yaml_text(out, f"# From {source}, by pearl-rl export roll.\n")
