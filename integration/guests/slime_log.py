"""slime tells the planner what a rollout looked like, and gets the server groups that would serve it best.

    --custom-rollout-log-function-path slime_log.log_rollout
    PEARL_GPU=h800 PEARL_MODEL=qwen3-8b PEARL_SGLANG_CONFIG=next.yaml

After each rollout the file that `PEARL_SGLANG_CONFIG` names holds the server groups to start with next time
(`--sglang-config next.yaml`): slime fixes them at start, so this is the point at which it can follow a decision.
slime's samples carry no decode times. Give the planner engine samples too (`observe_engine`), for instance from
SGLang's metrics, or set PEARL_TRUST_PRIOR=1 to let it choose by the roofline of the hardware.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pearl_planner import Guest
from pearl_state import Configuration, Decision, TurnSample
from pearl_state.samples import DecodeSample, PrefillSample

_guest: Guest | None = None


def turns_of(step: int, prompt_tokens: int, mask: Sequence[int], environment_s: float) -> list[TurnSample]:
    """Cut one sample into turns: runs of 1 in the loss mask were generated, what precedes each run is its prompt.

    `environment_s` is the whole sample's time outside generation; it is spread evenly over its pauses.
    """
    spans: list[tuple[int, int]] = []
    prompt, response = prompt_tokens, 0
    for generated in mask:
        if generated:
            response += 1
        else:
            if response:
                spans.append((prompt, response))
                prompt = response = 0
            prompt += 1
    if response:
        spans.append((prompt, response))
    pause = environment_s / max(1, len(spans) - 1)
    turns, context = [], 0
    for index, (new, generated) in enumerate(spans):
        last = index == len(spans) - 1
        turns.append(
            TurnSample(
                step=step,
                turn=index,
                new_prompt_tokens=new,
                response_tokens=generated,
                retained_tokens=generated,
                context_tokens=context + new,
                prefill_s=0.0,
                decode_s=0.0,
                queue_s=0.0,
                environment_s=0.0 if last else pause,
                last=last,
            )
        )
        context += new + generated
    return turns


def server_groups(configuration: Configuration, gpus_per_engine: int) -> str:
    """The configuration as slime's `--sglang-config`."""
    groups = [
        ("prefill", configuration.prefill),
        ("decode", configuration.decode),
        ("regular", configuration.colocated),
    ]
    lines = ["sglang:", "  - name: default", "    server_groups:"]
    for kind, workers in groups:
        if workers:
            lines.append(f"      - worker_type: {kind}")
            lines.append(f"        num_gpus: {workers * gpus_per_engine}")
            lines.append(f"        num_gpus_per_engine: {gpus_per_engine}")
    return "\n".join(lines) + "\n"


def observe_engine(decode: Iterable[DecodeSample] = (), prefill: Iterable[PrefillSample] = ()) -> None:
    """Tell the planner what engines measured. Call it after the first rollout."""
    global _guest
    if _guest is not None:
        _guest = _guest.observe_step(decode=tuple(decode), prefill=tuple(prefill))


def log_rollout(rollout_id: int, args: Any, samples: Sequence[Any], extra_metrics: Any, rollout_time: float) -> bool:
    """slime's hook. Returns False, so that slime logs as it always does."""
    global _guest
    del extra_metrics
    per_engine = args.rollout_num_gpus_per_engine
    if _guest is None:
        _guest = Guest.start(
            model=os.environ.get("PEARL_MODEL", "qwen3-8b"),
            gpu=os.environ.get("PEARL_GPU", "h800"),
            tensor_parallel=per_engine,
            calibrated=os.environ.get("PEARL_TRUST_PRIOR") == "1",
        )
    trajectories = [
        turns_of(
            rollout_id,
            len(sample.tokens) - sample.response_length,
            sample.loss_mask or [1] * sample.response_length,
            sample.non_generation_time,
        )
        for sample in samples
    ]
    ran = _running(args, per_engine)
    _guest = _guest.adopt(ran).observe_step(
        [turns for turns in trajectories if turns], batch=len(samples), segments=[(ran, rollout_time)]
    )
    _write(_guest.choose(ran.workers), per_engine)
    return False


def _running(args: Any, per_engine: int) -> Configuration:
    """What slime serves with: the server groups that it was started with, or what its simple flag says."""
    if getattr(args, "sglang_config", None):
        return running_groups(Path(args.sglang_config).read_text(), per_engine)
    workers = args.rollout_num_gpus // per_engine
    prefill = getattr(args, "prefill_num_servers", None) or 0
    return Configuration(prefill=prefill, decode=workers - prefill) if prefill else Configuration(colocated=workers)


def running_groups(text: str, per_engine: int) -> Configuration:
    """The configuration that a `--sglang-config` starts for the model that is trained."""
    import yaml  # slime reads the file with it, too

    models = yaml.safe_load(text)["sglang"]
    model = next((model for model in models if model.get("update_weights") is not False), models[0])
    counts: Counter[str] = Counter()
    for group in model.get("server_groups") or model.get("engine_groups") or []:
        each = group.get("num_gpus_per_engine") or model.get("num_gpus_per_engine") or per_engine
        counts[group["worker_type"]] += group["num_gpus"] // each
    return Configuration(prefill=counts["prefill"], decode=counts["decode"], colocated=counts["regular"])


def _write(decision: Decision, per_engine: int) -> None:
    target = Path(os.environ.get("PEARL_SGLANG_CONFIG", "pearl-sglang.yaml"))
    note = f"# {decision.reason}: {decision.selected}, {decision.predicted_s:.1f} s a batch\n"
    # Whole or not at all: slime may be starting right now.
    scratch = target.with_suffix(".part")
    scratch.write_text(note + server_groups(decision.selected, per_engine))
    scratch.replace(target)
