"""verl: Hydra overrides of a launch script, or a resolved YAML configuration."""

import math
import re
from collections.abc import Mapping
from typing import Final

from pearl_rl.importing.result import (
    Imported,
    Scalar,
    Source,
    put_aggregation,
    put_batch,
    put_clip,
    put_disaggregation,
    put_engine,
    put_estimator,
    put_lengths,
    put_model,
    put_pools,
)
from pearl_rl.importing.shell import training_command
from pearl_rl.importing.tree import Flat

_ENTRY = re.compile(r"^verl\.(?!.*sft|model_merger)|main_ppo|fully_async_main|^recipe\..*main_\w+$|^main_\w+\.py$")
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_V1 = "trainer.v1"
_SWITCH = f"{_V1}.separate_async.hybrid_rollout"
_MODULE = "(entry)"
_CONFIG = "(--config-name)"
"""Keys of ours for the module that the script starts, and for the configuration that it starts from."""
_OWN_CONFIGS = re.compile(r"(ppo|fully_async_ppo|one_step_off_ppo)(_[a-z]+)?_trainer")

NO_COUNTERPART: Final = {
    "async_training.dynamic_schedule": "PEARL decides by its own gate, eq. (7)",
    "async_training.partial_rollout": "PEARL always keeps partial responses",
    "async_training.": "PEARL bounds staleness alone: train.max_staleness_versions",
    f"{_SWITCH}.": "PEARL decides by its own gate, eq. (7)",
    f"{_V1}.": "PEARL bounds staleness alone: train.max_staleness_versions",
    f"{_ROLLOUT}.standalone_gpu_memory_utilization": "all workers are alike: engine.sglang.memory_fraction",
    f"{_ROLLOUT}.disaggregation.decode_tensor_model_parallel_size": "all workers are alike: cluster.gpus_per_worker",
    f"{_ROLLOUT}.disaggregation.transfer_backend": "name one of SGLang's: engine.sglang.transfer_backend",
    f"{_ROLLOUT}.disaggregation.": "PEARL derives ports and devices from the runtime",
    f"{_ROLLOUT}.val_kwargs.": "PEARL evaluates as it rolls out: evaluation.every_versions",
    f"{_ROLLOUT}.log_prob_": "the trainer's log-probabilities come with the update: train.micro_batch_tokens",
    f"{_ROLLOUT}.multi_turn.": "turns and tools belong to the environment: environment.name and environment.args",
    f"{_ROLLOUT}.agent.": "turns and tools belong to the environment: environment.name and environment.args",
    f"{_ROLLOUT}.checkpoint_engine.": "weights go by engine.sglang.weights",
    f"{_ROLLOUT}.engine_kwargs.sglang.": "give SGLang's own options as engine.sglang.extra_args",
    f"{_ROLLOUT}.engine_kwargs.": "options of an engine that PEARL does not start",
    f"{_ROLLOUT}.top_k": "PEARL samples by temperature and rollout.top_p",
    f"{_ROLLOUT}.": "PEARL starts its engines with its own options; SGLang's go into engine.sglang.extra_args",
    f"{_ACTOR}.megatron.": "PEARL trains with FSDP2",
    f"{_ACTOR}.fsdp_config.": "PEARL shards over all training GPUs",
    f"{_ACTOR}.strategy": "PEARL trains with FSDP2",
    f"{_ACTOR}.ppo_micro_batch_size": "PEARL counts tokens, not rows: train.micro_batch_tokens",
    f"{_ACTOR}.use_dynamic_bsz": "PEARL always fills micro-batches by tokens: train.micro_batch_tokens",
    f"{_ACTOR}.kl_loss_type": "PEARL has one estimator of the KL",
    f"{_ACTOR}.clip_ratio": "PEARL clips by train.clip_low and train.clip_high",
    f"{_ACTOR}.policy_loss.": "PEARL trains with grpo",
    f"{_ACTOR}.optim.": "AdamW with a constant rate after train.warmup_updates",
    f"{_ACTOR}.": "a detail of verl's trainer",
    "actor_rollout_ref.ref.": "the reference is the initial policy, on the training GPUs",
    "actor_rollout_ref.model.lora": "PEARL trains all weights",
    "actor_rollout_ref.model.": "PEARL takes the model as its folder says",
    "algorithm.use_kl_in_reward": "PEARL has the KL in the loss: train.kl_coefficient",
    "algorithm.kl_": "PEARL has the KL in the loss: train.kl_coefficient",
    "algorithm.rollout_correction.": "PEARL always weighs by trainer over rollout: train.importance_truncation",
    "algorithm.": "a detail of an estimator other than grpo's",
    "data.": "tasks come from the environment: environment.name and environment.args",
    "reward": "rewards come from the environment: environment.name and environment.args",
    "custom_reward_function.": "rewards come from the environment: environment.name and environment.args",
    "critic.": "GRPO has no critic",
    "trainer.critic_warmup": "GRPO has no critic",
    "trainer.logger": "see telemetry.sinks",
    "trainer.total_epochs": "PEARL counts steps: run.steps",
    "trainer.test_freq": "set evaluation.every_versions",
    "trainer.val_before_train": "set evaluation.every_versions",
    "trainer.default_local_dir": "set run.dir",
    "trainer.resume": "see pearl-rl resume",
    "trainer.project_name": "a name in verl's logs",
    "trainer.experiment_name": "a name in verl's logs",
    "trainer.": "a detail of verl's trainer",
    "rollout.": "PEARL counts steps: run.steps",
    "ray_kwargs.": "see cluster.ray",
    "actor_rollout_ref.nccl_timeout": "see limits.training",
    "model_engine": "PEARL trains with FSDP2",
    "distillation.": "PEARL trains with grpo",
    "global_profiler.": "see telemetry",
    "transfer_queue.": "PEARL moves trajectories by itself",
    "hydra": "Hydra's own",
    "defaults": "other files are named there, which are not read: give the resolved configuration for what they hold",
}
"""Beginning of a key → why nothing of ours is like it; the first that fits."""

_DEFAULTS: Final[Mapping[str, Scalar]] = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_p": 1.0,
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.lr_warmup_steps": 0,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.clip_ratio_low": 0.2,
    f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 16_384,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1_024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.save_freq": 0,
}
"""Of verl's `ppo_trainer` configuration."""

_FULLY_ASYNC: Final[Mapping[str, Scalar]] = {
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "data.train_batch_size": 0,
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
}
"""Of its `fully_async_ppo_trainer` configuration."""


def overrides(text: str) -> Flat:
    """`a.b=value` arguments of the training command in a launch script, and the module that it starts."""
    command = training_command(text, _ENTRY)
    flat: Flat = {}
    words = iter(command.arguments)
    for word in words:
        key, equals, value = word.lstrip("+~").partition("=")
        if key == "--config-name":
            flat[_CONFIG] = (value if equals else next(words, "")).removesuffix(".yaml")
        elif equals and not key.startswith("-"):
            flat[key] = None if value in ("null", "None", "~") else value
    return {_MODULE: command.entry, **flat} if flat else {}


def rolls_out(flat: Flat) -> bool:
    """Whether the job rolls out; fine-tuning and generation alone do not."""
    return any(key.startswith(("actor_rollout_ref.", "async_training.")) for key in flat)


def read(flat: Flat, model_path: str | None) -> Imported:
    """verl's keys into ours."""
    out = Imported("verl")
    module = str(flat.get(_MODULE, ""))
    config = str(flat.get(_CONFIG) or "ppo_trainer")
    fully = "fully_async" in module or any(key.startswith("async_training.") for key in flat)
    theirs = {key: value for key, value in flat.items() if key not in (_MODULE, _CONFIG)}
    source = Source(theirs, out, {**_DEFAULTS, **(_FULLY_ASYNC if fully else {})})
    put_model(out, source, "actor_rollout_ref.model.path", model_path)
    _cluster(out, source)
    _staleness(out, source, module)
    _batch(out, source)
    _optimizer(out, source)
    own = bool(_OWN_CONFIGS.fullmatch(config))
    _rollout(out, source, turns_known=own)
    if not own:
        what = f"'{config[:80]}' is another file, which is not read"
        out.drop(_CONFIG, f"{what}: import it too, or set by hand what it says")
    source.name_the_rest(NO_COUNTERPART)
    return out


def _product(source: Source, first: str, second: str) -> int | None:
    one, two = source.whole(first), source.whole(second)
    return None if one is None or two is None else one * two


def _cluster(out: Imported, source: Source) -> None:
    size = 1
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        size *= max(1, source.whole(f"{_ROLLOUT}.{name}", "cluster.gpus_per_worker") or 1)
    training = _product(source, "trainer.nnodes", "trainer.n_gpus_per_node")
    pool = "rollout" if source.get("rollout.n_gpus_per_node") is not None else _ROLLOUT
    rollout = _product(source, f"{pool}.nnodes", f"{pool}.n_gpus_per_node")
    if rollout is None and source.whole(f"{pool}.nnodes"):
        rollout = _product(source, f"{pool}.nnodes", "trainer.n_gpus_per_node")
    keys = "trainer.nnodes × n_gpus_per_node, rollout.nnodes × n_gpus_per_node, sizes of a replica"
    put_pools(out, training=training, rollout=rollout, shared=not rollout, size=size, keys=keys)
    lends = source.flag("async_training.use_dynamic_resource_scheduling") or source.flag(f"{_SWITCH}.enable_switch")
    if rollout:
        out.put("cluster.borrowing", "gated" if lends else "off", "use_dynamic_resource_scheduling or enable_switch")
    source.ignore("actor_rollout_ref.hybrid_engine", f"{_ROLLOUT}.mode")
    replicas = f"{_ROLLOUT}.disaggregation."
    if source.flag(f"{replicas}enabled"):
        put_disaggregation(
            out,
            prefill=source.whole(f"{replicas}prefill_replicas") or 1,
            decode=source.whole(f"{replicas}decode_replicas") or 1,
            rollout=rollout,
            size=size,
            keys=f"{replicas}*_replicas, of each replica",
        )
    put_engine(
        out,
        source,
        kind=source.text(f"{_ROLLOUT}.name"),
        memory=f"{_ROLLOUT}.gpu_memory_utilization",
        running=f"{_ROLLOUT}.max_num_seqs",
        chunk=f"{_ROLLOUT}.max_num_batched_tokens",
    )


def _staleness(out: Imported, source: Source, module: str) -> None:
    """How many weight versions a trajectory may be old: by share in the fully asynchronous trainer, else by mode."""
    share = source.number("async_training.staleness_threshold", "train.max_staleness_versions")
    mode = source.text(f"{_V1}.trainer_mode") or ""
    if share is not None:
        # Their share of samples that may be a weight version old; above 1 they may be older.
        key = source.origin("async_training.staleness_threshold")
        out.put("train.max_staleness_versions", min(1_000, max(0, math.ceil(share))), f"{key}, rounded up")
    elif "one_step_off" in module or "async" in mode:
        out.put("train.max_staleness_versions", 1, "rollout is one batch ahead")
    else:
        out.put("train.max_staleness_versions", 0, "rollout and training take turns")


def _batch(out: Imported, source: Source) -> None:
    mini = source.whole(f"{_ACTOR}.ppo_mini_batch_size")
    groups = source.whole("data.train_batch_size")
    cycle = source.whole("async_training.trigger_parameter_sync_step") or 1
    batches = source.whole("async_training.require_batches") or 1
    if not groups and mini:
        groups = mini * cycle * batches
    elif groups and source.has(f"{_V1}.separate_async.parameter_sync_step"):
        groups *= source.whole(f"{_V1}.separate_async.parameter_sync_step") or 1
    put_batch(
        out,
        groups=groups,
        group=source.whole(f"{_ROLLOUT}.n"),
        updates=groups // mini if groups and mini else None,
        keys="train_batch_size or ppo_mini_batch_size × require_batches × trigger_parameter_sync_step; rollout.n",
    )
    steps = source.whole("trainer.total_training_steps", "run.steps")
    if steps and steps > 0:
        out.put("run.steps", steps, "trainer.total_training_steps")
    save = source.whole("trainer.save_freq", "train.checkpoint_every_steps")
    if save is not None:
        # -1 is never there, and 0 only the last one here.
        out.put("train.checkpoint_every_steps", max(0, save), source.origin("trainer.save_freq"))


def _optimizer(out: Imported, source: Source) -> None:
    source.copy(f"{_ACTOR}.optim.lr", "train.learning_rate")
    source.copy(f"{_ACTOR}.optim.weight_decay", "train.weight_decay")
    warm = source.whole(f"{_ACTOR}.optim.lr_warmup_steps", "train.warmup_updates")
    share = source.number(f"{_ACTOR}.optim.lr_warmup_steps_ratio") or 0.0
    steps = out.settings.get("run.steps")
    if warm is not None and warm <= 0 < share:
        warm = int(share * int(steps)) if steps else None
        if warm is None:
            ratio = f"{_ACTOR}.optim.lr_warmup_steps_ratio"
            out.drop(ratio, f"{share:g} of a number of steps that is not said; set train.warmup_updates by hand")
    if warm is not None:
        out.put("train.warmup_updates", max(0, warm), source.origin(f"{_ACTOR}.optim.lr_warmup_steps"))
    put_clip(source, low=f"{_ACTOR}.clip_ratio_low", high=f"{_ACTOR}.clip_ratio_high")
    put_aggregation(out, source, f"{_ACTOR}.loss_agg_mode")
    norm = f"{_ACTOR}.optim.clip_grad"
    source.copy(norm if source.has(norm) else f"{_ACTOR}.grad_clip", "train.max_gradient_norm", least=1e-9)
    source.copy(f"{_ACTOR}.entropy_coeff", "train.entropy_coefficient", least=0)
    source.copy(f"{_ACTOR}.ppo_epochs", "train.epochs", whole=True)
    source.copy(f"{_ACTOR}.ppo_max_token_len_per_gpu", "train.micro_batch_tokens", whole=True)
    kl = source.number(f"{_ACTOR}.kl_loss_coef", "train.kl_coefficient")
    if source.flag(f"{_ACTOR}.use_kl_loss") and kl is not None:
        out.put("train.kl_coefficient", kl, source.origin(f"{_ACTOR}.kl_loss_coef"))
    put_estimator(out, source, "algorithm.adv_estimator")
    key = "algorithm.norm_adv_by_std_in_grpo"
    if source.has(key):
        out.put("train.baseline", "mean_std" if source.flag(key) else "mean", key)
    weight, most = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"
    if source.text(weight) == "token":
        source.copy(most, "train.importance_truncation", least=1)


def _rollout(out: Imported, source: Source, *, turns_known: bool) -> None:
    prompt = source.whole("data.max_prompt_length", "model.max_context_tokens")
    response = source.whole("data.max_response_length", "rollout.max_new_tokens")
    put_lengths(
        out,
        context=prompt + response if prompt and response else None,
        response=response,
        keys="data.max_prompt_length + data.max_response_length",
    )
    source.ignore(f"{_ROLLOUT}.prompt_length", f"{_ROLLOUT}.response_length", f"{_ROLLOUT}.max_model_len")
    source.copy(f"{_ROLLOUT}.temperature", "rollout.temperature")
    source.copy(f"{_ROLLOUT}.top_p", "rollout.top_p")
    turns = f"{_ROLLOUT}.multi_turn."
    if source.has(f"{turns}max_assistant_turns"):
        source.copy(f"{turns}max_assistant_turns", "rollout.max_turns", whole=True, least=1)
    elif turns_known and not source.flag(f"{turns}enable"):
        out.put("rollout.max_turns", 1, "multi_turn.enable is not set")
    source.ignore(f"{turns}enable", f"{turns}max_user_turns", f"{_ROLLOUT}.calculate_log_probs")
