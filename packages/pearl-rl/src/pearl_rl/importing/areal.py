"""AReaL: the YAML configuration of an experiment."""

import re
from collections.abc import Mapping
from typing import Final

from pearl_rl.importing.result import (
    Imported,
    Scalar,
    Source,
    put_batch,
    put_clip,
    put_engine,
    put_lengths,
    put_model,
    put_pools,
)
from pearl_rl.importing.tree import Flat

_PARALLEL = re.compile(r"([a-z])(\d+)")
_SERVES = re.compile(r"^\(?(sglang|vllm)\b")
_ENVIRONMENT = "name an environment: environment.name and environment.args"
_NAMES = "a name or folder in AReaL's logs"
_OPTIMIZER = "AdamW with a constant rate after train.warmup_updates"

NO_COUNTERPART: Final = {
    "ref.": "the reference is the initial policy, on the training GPUs",
    "teacher.": "PEARL trains with grpo",
    "critic.": "GRPO has no critic",
    "sglang.": "give SGLang's own options as engine.sglang.extra_args",
    "vllm.": "PEARL serves with its own engine or SGLang",
    "scheduler.": "PEARL schedules by itself",
    "cluster.": "see cluster.ray and run.dir",
    "econfig.": _ENVIRONMENT,
    "workflow": _ENVIRONMENT,
    "eval_workflow": _ENVIRONMENT,
    "agent_run_args.": _ENVIRONMENT,
    "export_style": _ENVIRONMENT,
    "train_dataset.": "tasks come from the environment: environment.name and environment.args",
    "valid_dataset.": "PEARL evaluates as it rolls out: evaluation.every_versions",
    "evaluator.": "PEARL evaluates as it rolls out: evaluation.every_versions",
    "eval_gconfig.": "PEARL evaluates as it rolls out: evaluation.every_versions",
    "recover.": "PEARL journals every event; see pearl-rl resume",
    "saver.": "set run.dir and train.checkpoint_every_steps",
    "stats_logger.": "see telemetry.sinks",
    "perf_tracer.": "see telemetry",
    "experiment_name": _NAMES,
    "trial_name": _NAMES,
    "total_train_epochs": "PEARL counts steps: run.steps",
    "enable_offload": "PEARL releases memory where a GPU changes hands",
    "rollout.agent.": _ENVIRONMENT,
    "rollout.scheduling_spec": "PEARL places workers by itself",
    "rollout.max_concurrent_rollouts": "PEARL dispatches what a step trains on",
    "rollout.": "a detail of AReaL's rollout",
    "gconfig.": "PEARL samples by rollout.temperature and rollout.top_p",
    "actor.optimizer.": _OPTIMIZER,
    "actor.kl_estimator": "PEARL has one estimator of the KL",
    "actor.reward_": "PEARL takes each group's own baseline: train.baseline",
    "actor.adv_norm": "PEARL takes each group's own baseline: train.baseline",
    "actor.rejection_sampling.": "PEARL truncates importance weights: train.importance_truncation",
    "actor.behav": "PEARL truncates importance weights: train.importance_truncation",
    "actor.use_decoupled_loss": "PEARL always weighs by trainer over rollout: train.importance_truncation",
    "actor.recompute_logprob": "PEARL always weighs by trainer over rollout: train.importance_truncation",
    "actor.use_lora": "PEARL trains all weights",
    "actor.lora": "PEARL trains all weights",
    "actor.peft": "PEARL trains all weights",
    "actor.scheduling_spec": "PEARL places workers by itself",
    "actor.weight_update_mode": "weights go by engine.sglang.weights",
    "actor.experiment_name": _NAMES,
    "actor.trial_name": _NAMES,
    "actor.": "PEARL trains with FSDP2",
}
"""Beginning of a key → why nothing of ours is like it; the first that fits."""

_DEFAULTS: Final[Mapping[str, Scalar]] = {
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16_384,
    "gconfig.max_tokens": 32_768,
    "gconfig.temperature": 1.0,
    "gconfig.top_p": 1.0,
    "rollout.max_head_offpolicyness": 0,
    "actor.ppo_n_minibatches": 4,
    "actor.eps_clip": 0.2,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.gradient_clipping": 1.0,
    "saver.freq_steps": 0,
    "seed": 1,
}
"""Of AReaL's configuration classes."""


def parallelism(text: str) -> tuple[int, int]:
    """GPUs in all, and GPUs of one worker, of a backend like `sglang:d4p1t2`. (0, 1) for what is none.

    Where attention and experts are laid out apart, like in `megatron:(attn:d2t2|ffn:d1e4)`, both fill the same GPUs.
    """
    attention = re.search(r"attn:([a-z\d]+)", text)
    sizes = {
        name: int(count[:9]) for name, count in _PARALLEL.findall(attention[1] if attention else text.split(":")[-1])
    }
    if not sizes or any(size > 1_000_000 for size in sizes.values()):
        return 0, 1
    worker = sizes.get("t", 1) * sizes.get("p", 1)
    return sizes.get("d", 1) * worker * sizes.get("c", 1), worker


def pools(mode: str) -> tuple[str, str]:
    """What serves and what trains in an allocation like `sglang:d4t2+fsdp:d8`; empty for none."""
    terms = re.split(r"\+(?![^(]*\))", mode)
    serves = next((term for term in terms if _SERVES.match(term)), "")
    trains = next((term for term in terms if not _SERVES.match(term)), "")
    return serves, trains


def rolls_out(flat: Flat) -> bool:
    """Whether the job rolls out; fine-tuning, reward models and preferences do not."""
    return any(key.startswith(("gconfig.", "rollout.")) for key in flat)


def read(flat: Flat, model_path: str | None) -> Imported:
    """AReaL's keys into ours."""
    out = Imported("areal")
    source = Source(flat, out, _DEFAULTS)
    put_model(out, source, "actor.path", model_path)
    source.ignore("model_path", "tokenizer_path")
    _cluster(out, source)
    put_batch(
        out,
        groups=source.whole("train_dataset.batch_size", "train.groups_per_step"),
        group=source.whole("gconfig.n_samples", "train.group_size"),
        updates=source.whole("actor.ppo_n_minibatches", "train.minibatches"),
        keys="train_dataset.batch_size, gconfig.n_samples",
    )
    _lengths(out, source)
    source.copy("rollout.max_head_offpolicyness", "train.max_staleness_versions", whole=True, least=0, most=1_000)
    _optimizer(out, source)
    source.copy("econfig.max_steps", "rollout.max_turns", whole=True, least=1)
    source.copy("max_turns", "rollout.max_turns", whole=True, least=1)
    source.copy("total_train_steps", "run.steps", whole=True)
    source.copy("seed", "run.seed", whole=True)
    source.copy("saver.freq_steps", "train.checkpoint_every_steps", whole=True)
    source.ignore("actor.temperature", "actor.max_new_tokens", "rollout.consumer_batch_size")
    source.name_the_rest(NO_COUNTERPART)
    return out


def _cluster(out: Imported, source: Source) -> None:
    mode = source.text("allocation_mode")
    serve, train = pools(mode or "")
    serve, train = serve or source.text("rollout.backend") or "", train or source.text("actor.backend") or ""
    source.ignore("rollout.backend", "actor.backend")
    rollout, size = parallelism(serve)
    training, _ = parallelism(train)
    keys = "allocation_mode" if mode else "rollout.backend, actor.backend"
    put_pools(out, training=training, rollout=rollout, shared=not rollout, size=size, keys=keys)
    if rollout:
        out.put("cluster.borrowing", "off", "AReaL does not lend training GPUs")
    engine = "vllm" if "vllm" in serve else "sglang"
    put_engine(
        out,
        source,
        kind=engine if serve else None,
        memory="vllm.gpu_memory_utilization" if engine == "vllm" else "sglang.mem_fraction_static",
        running="vllm.max_num_seqs" if engine == "vllm" else "sglang.max_running_requests",
        chunk="vllm.max_num_batched_tokens" if engine == "vllm" else "sglang.chunked_prefill_size",
    )


def _lengths(out: Imported, source: Source) -> None:
    response = source.whole("gconfig.max_new_tokens", "rollout.max_new_tokens")
    prompt = source.whole("train_dataset.max_length", "model.max_context_tokens")
    context = source.whole("gconfig.max_tokens", "model.max_context_tokens")
    served = source.whole("sglang.context_length", "model.max_context_tokens")
    if not source.has("gconfig.max_tokens"):
        # Their own bound is there for a longest model; what prompt and response come to, or the engine, is nearer.
        context = prompt + response if prompt and response else served or context
    put_lengths(out, context=context, response=response, keys="gconfig.max_tokens, gconfig.max_new_tokens")
    source.copy("gconfig.temperature", "rollout.temperature")
    source.copy("gconfig.top_p", "rollout.top_p")


def _optimizer(out: Imported, source: Source) -> None:
    source.copy("actor.optimizer.lr", "train.learning_rate")
    source.copy("actor.optimizer.weight_decay", "train.weight_decay")
    source.copy("actor.optimizer.gradient_clipping", "train.max_gradient_norm")
    higher = "actor.eps_clip_higher"
    put_clip(source, low="actor.eps_clip", high=higher if source.has(higher) else "actor.eps_clip")
    if not source.has("actor.kl_ctl") or source.number("actor.kl_ctl", "train.kl_coefficient") == 0:
        source.ignore("actor.kl_ctl")
    else:
        out.drop("actor.kl_ctl", "is a KL in the reward; PEARL has it in the loss: set train.kl_coefficient by hand")
    out.put("train.aggregation", "token_mean", "AReaL weighs tokens alike")
    source.copy("actor.mb_spec.max_tokens_per_mb", "train.micro_batch_tokens", whole=True)
