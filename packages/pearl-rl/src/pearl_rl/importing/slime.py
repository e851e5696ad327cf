"""slime: command-line flags of a launch script."""

import re
from collections.abc import Mapping
from typing import Final

from pearl_rl.importing.result import (
    Imported,
    Scalar,
    Source,
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

_ENTRY = re.compile(r"(^|/)train(_async)?\.py$")
_ARRAYS = re.compile(r"^\s*([A-Z_]+_ARGS)=\(", re.MULTILINE)
_FILE = "(entry)"
"""Key of ours for the file that the script starts, which says whether rollout runs ahead."""

_TRAINER = "PEARL trains with FSDP2"
_TASKS = "tasks come from the environment: environment.name and environment.args"
_SHAPE = "PEARL takes the model's shape from its folder"
_EVALUATION = "PEARL evaluates as it rolls out: evaluation.every_versions"

NO_COUNTERPART: Final = {
    "sglang-config": "give the roles as planner.policy and planner.configuration",
    "sglang-": "give SGLang's own options as engine.sglang.extra_args",
    "router-": "PEARL routes by itself",
    "use-slime-router": "PEARL routes by itself",
    "use-fault-tolerance": "always on",
    "partial-rollout": "PEARL always keeps partial responses",
    "over-sampling-batch-size": "PEARL dispatches what a step trains on",
    "dynamic-sampling-filter": "PEARL trains on every group",
    "offload": "PEARL releases memory where a GPU changes hands",
    "update-weight": "weights go by engine.sglang.weights",
    "num-gpus-per-node": "PEARL places workers by itself",
    "eval-": _EVALUATION,
    "n-samples-per-eval-prompt": _EVALUATION,
    "prompt-data": _TASKS,
    "input-key": _TASKS,
    "label-key": _TASKS,
    "metadata-key": _TASKS,
    "multimodal-keys": _TASKS,
    "apply-chat-template": _TASKS,
    "rollout-shuffle": _TASKS,
    "num-epoch": "PEARL counts steps: run.steps",
    "custom-": "code of one's own goes into an environment: environment.name",
    "rollout-function-path": "PEARL rolls out by itself; code of one's own goes into an environment: environment.name",
    "rm-": "rewards come from the environment: environment.name and environment.args",
    "reward-key": "rewards come from the environment: environment.name and environment.args",
    "rollout-top-k": "PEARL samples by temperature and rollout.top_p",
    "rollout-stop": "a turn ends as the environment says",
    "rollout-": "a detail of slime's rollout",
    "kl-loss-type": "PEARL has one estimator of the KL",
    "kl-coef": "PEARL has the KL in the loss: train.kl_coefficient",
    "use-kl-loss": "without a coefficient it counts nothing",
    "eps-clip-c": "PEARL clips by train.clip_low and train.clip_high",
    "wandb": "see telemetry.sinks",
    "use-wandb": "see telemetry.sinks",
    "use-tensorboard": "see telemetry.sinks",
    "tensorboard": "see telemetry.sinks",
    "ref-load": "the reference is the initial policy",
    "load": "see pearl-rl resume",
    "save": "set run.dir",
    "optimizer": "PEARL trains with AdamW",
    "adam-": "PEARL trains with AdamW",
    "lr-": "a constant rate after train.warmup_updates",
    "min-lr": "a constant rate after train.warmup_updates",
    "micro-batch-size": "PEARL counts tokens, not rows: train.micro_batch_tokens",
    "tis-": "PEARL truncates weights from above: train.importance_truncation",
    "loss-type": "PEARL trains with grpo",
    "normalize-advantages": "PEARL takes each group's own baseline: train.baseline",
    "use-opd": "PEARL trains with grpo",
    "opd-": "PEARL trains with grpo",
    **dict.fromkeys(
        (
            "tensor-model-parallel-size",
            "pipeline-model-parallel-size",
            "context-parallel-size",
            "sequence-parallel",
            "expert-",
            "recompute-",
            "train-backend",
            "accumulate-allreduce",
            "decoder-",
            "use-distributed-optimizer",
            "transformer-impl",
            "overlap-",
            "use-precision-aware-optimizer",
            "log-probs-chunk-size",
            "attention-backend",
            "attention-softmax",
            "no-",
        ),
        _TRAINER,
    ),
    **dict.fromkeys(
        (
            "attention-",
            "hidden-",
            "num-",
            "moe-",
            "rotary-",
            "ffn-",
            "norm",
            "qk-",
            "swiglu",
            "group-query",
            "kv-channels",
            "vocab-",
            "disable-bias",
            "untie-",
            "position-",
            "spec",
            "apply-layernorm",
            "use-gated",
            "mtp-",
            "model-name",
        ),
        _SHAPE,
    ),
}
"""Beginning of a flag → why nothing of ours is like it; the first that fits."""

_DEFAULTS: Final[Mapping[str, Scalar]] = {
    "actor-num-nodes": 1,
    "actor-num-gpus-per-node": 8,
    "rollout-num-gpus-per-engine": 1,
    "n-samples-per-prompt": 1,
    "rollout-temperature": 1.0,
    "rollout-top-p": 1.0,
    "lr": 1e-6,
    "weight-decay": 0.01,
    "clip-grad": 1.0,
    "eps-clip": 0.2,
    "entropy-coef": 0.0,
    "kl-loss-coef": 0.0,
    "lr-warmup-iters": 0,
    "save-interval": 0,
    "advantage-estimator": "grpo",
    "tis-clip": 2.0,
}
"""Of slime's and Megatron's arguments."""


def flags(text: str) -> Flat:
    """Flags of the training command, without their dashes, and its file; a flag without a value is true."""
    command = training_command(text, _ENTRY)
    if not command.entry and _ARRAYS.search(text):
        # Some scripts end before the command; the arrays are what it would be given.
        given = " ".join(f'"${{{name}[@]}}"' for name in _ARRAYS.findall(text))
        command = training_command(f"{text}\ntrain.py {given}", _ENTRY)
    flat: Flat = {}
    name = ""
    for word in command.arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flat[name] = value if equals else "true"
        elif name:
            flat[name] = word if flat[name] == "true" else f"{flat[name]} {word}"
    return {_FILE: command.entry, **flat} if flat else {}


def rolls_out(flat: Flat) -> bool:
    """Whether the job rolls out; fine-tuning, which slime calls a kind of rollout, does not."""
    tuned = str(flat.get("loss-type", "")).startswith("sft")
    return not tuned and any(key.startswith(("rollout-", "n-samples-per-prompt")) for key in flat)


def read(flat: Flat, model_path: str | None) -> Imported:
    """slime's flags into our settings."""
    out = Imported("slime")
    source = Source({key: value for key, value in flat.items() if key != _FILE}, out, _DEFAULTS)
    put_model(out, source, "hf-checkpoint", model_path)
    _cluster(out, source)
    ahead = "async" in str(flat.get(_FILE, ""))
    why = "train_async.py is one rollout ahead" if ahead else "train.py takes turns"
    out.put("train.max_staleness_versions", int(ahead), why)
    source.ignore("update-weights-interval")
    _batch(out, source)
    _optimizer(out, source)
    context = source.whole("rollout-max-context-len", "model.max_context_tokens")
    prompt = source.whole("rollout-max-prompt-len", "model.max_context_tokens")
    response = source.whole("rollout-max-response-len", "rollout.max_new_tokens")
    if context is None and response:
        context = response + (prompt or response)
        if not prompt:
            out.drop("(context)", f"prompts have no bound there; {context} tokens are taken, twice a response")
    keys = "rollout-max-context-len or prompt and response lengths"
    put_lengths(out, context=context, response=response, keys=keys)
    source.copy("rollout-temperature", "rollout.temperature")
    source.copy("rollout-top-p", "rollout.top_p")
    source.name_the_rest(NO_COUNTERPART)
    return out


def _cluster(out: Imported, source: Source) -> None:
    nodes = source.whole("actor-num-nodes", "cluster.training_gpus")
    each = source.whole("actor-num-gpus-per-node", "cluster.training_gpus")
    shared = source.flag("colocate")
    size = max(1, source.whole("rollout-num-gpus-per-engine", "cluster.gpus_per_worker") or 1)
    rollout = source.whole("rollout-num-gpus", "cluster.reserved_rollout_gpus")
    training = nodes * each if nodes and each else rollout if shared else None
    keys = "actor-num-nodes × actor-num-gpus-per-node, rollout-num-gpus, rollout-num-gpus-per-engine"
    put_pools(out, training=training, rollout=rollout, shared=shared, size=size, keys=keys)
    if not shared:
        out.put("cluster.borrowing", "off", "slime does not lend training GPUs")
    serving = rollout or (training if shared else 0) or 0
    prefill = source.whole("prefill-num-servers", "planner.configuration")
    if prefill and serving // size > prefill:
        key = "prefill-num-servers"
        put_disaggregation(out, prefill=prefill, decode=serving // size - prefill, rollout=0, size=size, keys=key)
    elif prefill:
        out.drop("prefill-num-servers", f"{prefill} of {serving // size} servers leave none to decode")
    put_engine(
        out,
        source,
        kind="sglang",
        memory="sglang-mem-fraction-static",
        running="sglang-max-running-requests",
        chunk="sglang-chunked-prefill-size",
    )


def _batch(out: Imported, source: Source) -> None:
    groups = source.whole("rollout-batch-size", "train.groups_per_step")
    group = source.whole("n-samples-per-prompt", "train.group_size")
    whole, updates = source.whole("global-batch-size"), source.whole("num-steps-per-rollout")
    if not updates and whole and groups and group:
        updates = groups * group // whole
    put_batch(out, groups=groups, group=group, updates=updates, keys="rollout-batch-size, n-samples-per-prompt")
    source.copy("num-rollout", "run.steps", whole=True)
    source.copy("save-interval", "train.checkpoint_every_steps", whole=True)
    source.copy("seed", "run.seed", whole=True)
    source.ignore("balance-data", "use-dynamic-batch-size")


def _optimizer(out: Imported, source: Source) -> None:
    source.copy("lr", "train.learning_rate")
    source.copy("weight-decay", "train.weight_decay")
    source.copy("lr-warmup-iters", "train.warmup_updates", whole=True, least=0)
    source.copy("clip-grad", "train.max_gradient_norm")
    put_clip(source, low="eps-clip", high="eps-clip-high" if source.has("eps-clip-high") else "eps-clip")
    source.copy("entropy-coef", "train.entropy_coefficient", least=0)
    source.copy("max-tokens-per-gpu", "train.micro_batch_tokens", whole=True)
    kl = source.number("kl-loss-coef", "train.kl_coefficient")
    if source.flag("use-kl-loss") and kl is not None:
        out.put("train.kl_coefficient", kl, source.origin("kl-loss-coef"))
    tokens = source.flag("calculate-per-token-loss")
    out.put("train.aggregation", "token_mean" if tokens else "sequence_mean", "calculate-per-token-loss, or without it")
    plain = source.flag("disable-grpo-std-normalization")
    out.put("train.baseline", "mean" if plain else "mean_std", "disable-grpo-std-normalization, or without it")
    if source.flag("use-tis"):
        source.copy("tis-clip", "train.importance_truncation", least=1)
    put_estimator(out, source, "advantage-estimator")
