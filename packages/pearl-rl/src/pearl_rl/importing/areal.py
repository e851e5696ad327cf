"""AReaL: the YAML configuration of an experiment."""

import re

from pearl_rl.importing.result import Imported, Source, put_batch, put_lengths, put_model, put_pools
from pearl_rl.importing.tree import Flat

_PARALLEL = re.compile(r"([a-z])(\d+)")

NO_COUNTERPART = {
    "ref.": "the reference is the initial policy, on the training GPUs",
    "critic.": "GRPO has no critic",
    "sglang.": "PEARL starts SGLang with its own options",
    "vllm.": "PEARL serves with its own engine or SGLang",
    "scheduler.": "PEARL schedules by itself",
    "econfig.": "name an environment: environment.name and environment.args",
    "recover.": "PEARL journals every event; see pearl-rl resume",
}


def parallelism(text: str) -> tuple[int, int]:
    """GPUs in all, and GPUs of one worker, of a backend like `sglang:d4p1t2`. (0, 1) for what is none."""
    sizes = {name: int(count) for name, count in _PARALLEL.findall(text.split(":")[-1])}
    if not sizes or any(size > 1_000_000 for size in sizes.values()):
        return 0, 1
    worker = sizes.get("t", 1) * sizes.get("p", 1)
    return sizes.get("d", 1) * worker * sizes.get("c", 1), worker


def read(flat: Flat, model_path: str | None) -> Imported:
    """AReaL's keys into ours."""
    out = Imported("areal")
    source = Source(flat, out)
    put_model(out, source, "actor.path", model_path)
    mode = source.text("allocation_mode")
    serve, _, train = (mode or "").partition("+")
    serve, train = serve or source.text("rollout.backend") or "", train or source.text("actor.backend") or ""
    source.ignore("rollout.backend", "actor.backend")
    rollout, size = parallelism(serve)
    training, _ = parallelism(train)
    keys = "allocation_mode" if mode else "rollout.backend, actor.backend"
    put_pools(out, training=training, rollout=rollout, shared=not rollout, size=size, keys=keys)
    if rollout:
        out.put("cluster.borrowing", "off", "AReaL does not lend training GPUs")
    put_batch(
        out,
        groups=source.whole("train_dataset.batch_size"),
        group=source.whole("gconfig.n_samples"),
        updates=source.whole("actor.ppo_n_minibatches"),
        keys="train_dataset.batch_size, gconfig.n_samples",
    )
    context = source.whole("gconfig.max_tokens") or source.whole("sglang.context_length")
    response = source.whole("gconfig.max_new_tokens")
    if context is None and response:
        context = response + (source.whole("train_dataset.max_length") or response)
    put_lengths(out, context=context, response=response, keys="gconfig.max_tokens, gconfig.max_new_tokens")
    source.copy("gconfig.temperature", "rollout.temperature")
    source.copy("gconfig.top_p", "rollout.top_p")
    source.copy("rollout.max_head_offpolicyness", "train.max_staleness_versions", whole=True)
    source.copy("actor.optimizer.lr", "train.learning_rate")
    source.copy("actor.optimizer.weight_decay", "train.weight_decay")
    source.copy("actor.optimizer.gradient_clipping", "train.max_gradient_norm")
    source.copy("actor.eps_clip", "train.clip_low")
    source.copy("actor.eps_clip", "train.clip_high")
    source.copy("actor.kl_ctl", "train.kl_coefficient")
    source.copy("actor.mb_spec.max_tokens_per_mb", "train.micro_batch_tokens", whole=True)
    source.copy("econfig.max_steps", "rollout.max_turns", whole=True)
    source.copy("total_train_steps", "run.steps", whole=True)
    source.copy("seed", "run.seed", whole=True)
    source.copy("saver.freq_steps", "train.checkpoint_every_steps", whole=True)
    source.ignore("actor.temperature", "actor.max_new_tokens", "rollout.consumer_batch_size", "tokenizer_path")
    source.name_the_rest(NO_COUNTERPART)
    return out
