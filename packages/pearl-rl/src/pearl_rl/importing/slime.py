"""slime: command-line flags of a launch script."""

import re

from pearl_rl.importing.result import Imported, Source, put_batch, put_lengths, put_model, put_pools
from pearl_rl.importing.shell import command_arguments
from pearl_rl.importing.tree import Flat

_ENTRY = re.compile(r"train(_async)?\.py$")
_ARRAYS = re.compile(r"^\s*[A-Z_]+_ARGS=\(", re.MULTILINE)

NO_COUNTERPART = {
    "sglang-config": "give the roles as planner.policy and planner.configuration",
    "sglang-": "PEARL starts SGLang with its own options",
    "router-": "PEARL routes by itself",
    "use-slime-router": "PEARL routes by itself",
    "use-fault-tolerance": "always on",
    "partial-rollout": "PEARL always keeps partial responses",
    "offload": "PEARL releases memory where a GPU changes hands",
    "tensor-model-parallel-size": "PEARL trains with FSDP2",
    "pipeline-model-parallel-size": "PEARL trains with FSDP2",
    "context-parallel-size": "PEARL trains with FSDP2",
    "expert-": "PEARL trains with FSDP2",
}


def flags(text: str) -> Flat:
    """Flags of the training command, without their dashes; a flag without a value is true."""
    words = command_arguments(text, _ENTRY)
    if not words and _ARRAYS.search(text):
        # Some scripts end before the command; the arrays are what it would be given.
        names = re.findall(r"^\s*([A-Z_]+_ARGS)=\(", text, re.MULTILINE)
        words = command_arguments(text + "\ntrain.py " + " ".join(f'"${{{name}[@]}}"' for name in names), _ENTRY)
    flat: Flat = {}
    name = ""
    for word in words:
        if re.fullmatch(r"[|;&]+|\d?>.*", word):
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flat[name] = value if equals else "true"
        elif name:
            flat[name] = word if flat[name] == "true" else f"{flat[name]} {word}"
    return flat


def read(flat: Flat, model_path: str | None) -> Imported:
    """slime's flags into our settings."""
    out = Imported("slime")
    source = Source(flat, out)
    put_model(out, source, "hf-checkpoint", model_path)
    _cluster(out, source)
    _train(out, source)
    context = source.whole("rollout-max-context-len")
    prompt, response = source.whole("rollout-max-prompt-len"), source.whole("rollout-max-response-len")
    if context is None and response:
        context = response + (prompt or response)
    keys = "rollout-max-context-len or prompt and response lengths"
    put_lengths(out, context=context, response=response, keys=keys)
    source.copy("rollout-temperature", "rollout.temperature")
    source.copy("rollout-top-p", "rollout.top_p")
    source.name_the_rest(NO_COUNTERPART)
    return out


def _cluster(out: Imported, source: Source) -> None:
    nodes, each = source.whole("actor-num-nodes") or 1, source.whole("actor-num-gpus-per-node")
    shared = source.flag("colocate")
    size = source.whole("rollout-num-gpus-per-engine") or 1
    rollout = source.whole("rollout-num-gpus")
    keys = "actor-num-nodes × actor-num-gpus-per-node, rollout-num-gpus, rollout-num-gpus-per-engine"
    put_pools(
        out, training=nodes * each if each else rollout if shared else None, rollout=rollout, shared=shared, size=size,
        keys=keys,
    )  # fmt: skip
    if not shared:
        out.put("cluster.borrowing", "off", "slime does not lend training GPUs")
    prefill = source.whole("prefill-num-servers")
    if prefill and rollout:
        out.put("planner.policy", "static_pd", "prefill-num-servers")
        out.put("planner.configuration", f"{prefill}P{rollout // size - prefill}D", "prefill-num-servers")


def _train(out: Imported, source: Source) -> None:
    groups, group = source.whole("rollout-batch-size"), source.whole("n-samples-per-prompt")
    whole, updates = source.whole("global-batch-size"), source.whole("num-steps-per-rollout")
    if not updates and whole and groups and group:
        updates = groups * group // whole
    put_batch(out, groups=groups, group=group, updates=updates, keys="rollout-batch-size, n-samples-per-prompt")
    source.copy("num-rollout", "run.steps", whole=True)
    source.copy("lr", "train.learning_rate")
    source.copy("weight-decay", "train.weight_decay")
    source.copy("clip-grad", "train.max_gradient_norm")
    source.copy("eps-clip", "train.clip_low")
    source.copy("eps-clip-high" if source.has("eps-clip-high") else "eps-clip", "train.clip_high")
    source.copy("entropy-coef", "train.entropy_coefficient")
    source.copy("max-tokens-per-gpu", "train.micro_batch_tokens", whole=True)
    source.copy("save-interval", "train.checkpoint_every_steps", whole=True)
    source.copy("seed", "run.seed", whole=True)
    kl = source.number("kl-loss-coef")
    if source.flag("use-kl-loss") and kl is not None:
        out.put("train.kl_coefficient", kl, "kl-loss-coef")
    estimator = source.text("advantage-estimator")
    if estimator not in (None, "grpo"):
        out.drop("advantage-estimator", f"'{estimator}' is not there; PEARL trains with grpo")
    source.ignore("balance-data", "use-dynamic-batch-size")
