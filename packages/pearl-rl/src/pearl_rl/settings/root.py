"""The whole configuration, and the rules that tie its sections together."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import Field

from pearl_executor.engines.sglang.options import is_address
from pearl_rl.settings.control import ControlSettings
from pearl_rl.settings.job import (
    EnvironmentSettings,
    EvaluationSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    Section,
    TrainSettings,
)
from pearl_rl.settings.labels import parse_labels
from pearl_rl.settings.names import with_tiderl
from pearl_rl.settings.platform import (
    AvailabilitySettings,
    ClusterSettings,
    DeviceSettings,
    EngineSettings,
    LimitSettings,
    PlannerSettings,
)
from pearl_rl.settings.telemetry import TelemetrySettings
from pearl_state.configuration import Configuration
from pearl_state.errors import ConfigurationError


class Settings(Section):
    """Every setting of a training run."""

    run: RunSettings = Field(description="how long, from which seed, and where the run folder goes")
    model: ModelSettings = Field(description="what is trained")
    train: TrainSettings = Field(description="the update")
    rollout: RolloutSettings = Field(description="how trajectories are generated")
    evaluation: EvaluationSettings = Field(description="episodes that train nobody, beside the training rollouts")
    environment: EnvironmentSettings = Field(description="what the model acts in")
    engine: EngineSettings = Field(description="the inference engine of one rollout worker")
    cluster: ClusterSettings = Field(description="logical GPUs, and who may use them")
    availability: AvailabilitySettings = Field(description="when preemptible GPUs come and go")
    device: DeviceSettings = Field(description="the emulated device that each worker is paced to")
    planner: PlannerSettings = Field(description="how configurations are chosen")
    telemetry: TelemetrySettings = Field(description="where traces, metrics and scalars go")
    control: ControlSettings = Field(description="how people reach the run while it goes on")
    limits: LimitSettings = Field(description="bound of each wait")


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A rule between settings that is broken."""

    keys: tuple[str, ...]
    """Dotted names of the settings at odds; whoever reports it points to the one that was set last."""
    text: str
    """What is wrong and what to do, on one line."""


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """Every rule between settings that `settings` breaks. Looks at the file system for the paths they name."""
    for rule in _RULES:
        yield from rule(settings)


def _batch(settings: Settings) -> Iterator[Contradiction]:
    train, batch = settings.train, settings.rollout.batch_size
    product = train.groups_per_step * train.group_size
    if batch != product:
        yield Contradiction(
            ("rollout.batch_size", "train.groups_per_step", "train.group_size"),
            f"rollout.batch_size={batch} is not train.groups_per_step × train.group_size = "
            f"{train.groups_per_step} × {train.group_size}; use rollout.batch_size={product}, or change the groups",
        )


def _gpus(settings: Settings) -> Iterator[Contradiction]:
    cluster = settings.cluster
    size = cluster.gpus_per_worker
    pools = {
        "reserved_rollout_gpus": (cluster.reserved_rollout_gpus, "reserved rollout GPUs"),
        "max_preemptible_gpus": (cluster.max_preemptible_gpus, "preemptible rollout GPUs"),
    }
    if cluster.borrowing != "off":
        pools["training_gpus"] = (cluster.training_gpus, "training GPUs (which rollout borrows)")
    for name, (gpus, words) in pools.items():
        if gpus % size:
            below, above = gpus - gpus % size, gpus - gpus % size + size
            use = f"{below} or {above}" if below else f"{above}"
            yield Contradiction(
                (f"cluster.{name}", "cluster.gpus_per_worker"),
                f"{gpus} {words} do not divide by gpus_per_worker={size}; use {use}",
            )
    if cluster.reserved_rollout_gpus == 0 and cluster.max_preemptible_gpus == 0:
        yield Contradiction(
            ("cluster.reserved_rollout_gpus", "cluster.max_preemptible_gpus"),
            f"no GPUs are left for rollout; use cluster.reserved_rollout_gpus={size} or more",
        )


def _tiny_model(settings: Settings) -> Iterator[Contradiction]:
    tiny = settings.model.tiny
    if settings.model.path == "tiny" and tiny.heads % tiny.kv_heads:
        fits = [n for n in range(1, tiny.heads + 1) if tiny.heads % n == 0]
        nearest = min(fits, key=lambda n: abs(n - tiny.kv_heads))
        yield Contradiction(
            ("model.tiny.kv_heads", "model.tiny.heads"),
            f"{tiny.kv_heads} key/value heads do not divide {tiny.heads} heads; use model.tiny.kv_heads={nearest}",
        )


def _model_path(settings: Settings) -> Iterator[Contradiction]:
    path = settings.model.path
    if path == "tiny":
        return
    problem = _folder_problem(path)
    if problem is None and not os.path.isfile(os.path.join(path, "config.json")):
        problem = "is a folder without config.json"
    if problem:
        yield Contradiction(
            ("model.path",), f"the model's path {problem}; give a folder of a Hugging Face causal LM, or 'tiny'"
        )


def _resume(settings: Settings) -> Iterator[Contradiction]:
    source = settings.run.resume_from
    problem = _folder_problem(source) if source else None
    if problem:
        yield Contradiction(("run.resume_from",), f"{problem}; give a run folder or a checkpoint, or leave it empty")


def _folder_problem(path: str) -> str | None:
    """Why `path` is no folder, or None. `os.path` answers for any text, also one that no file can have as name."""
    if os.path.isdir(path):
        return None
    return "is not a folder" if os.path.exists(path) else "does not exist"


def _tokens(settings: Settings) -> Iterator[Contradiction]:
    context, rollout, engine = settings.model.max_context_tokens, settings.rollout, settings.engine
    if rollout.max_new_tokens >= context:
        yield Contradiction(
            ("rollout.max_new_tokens", "model.max_context_tokens"),
            f"responses of {rollout.max_new_tokens} tokens leave no room for a prompt in "
            f"model.max_context_tokens={context}; use rollout.max_new_tokens={max(1, context // 4)}",
        )
    if engine.kv_tokens < context:
        yield Contradiction(
            ("engine.kv_tokens", "model.max_context_tokens"),
            f"a cache of {engine.kv_tokens} tokens does not hold one trajectory of "
            f"model.max_context_tokens={context}; use engine.kv_tokens={context} or more",
        )


def _task_batching(settings: Settings) -> Iterator[Contradiction]:
    rollout, context = settings.rollout, settings.model.max_context_tokens
    room = int(settings.engine.kv_tokens * rollout.kv_budget_fraction)
    if batches_tasks(settings) and room < context:
        yield Contradiction(
            ("rollout.kv_budget_fraction", "engine.kv_tokens", "rollout.task_batching", "planner.policy"),
            f"rollout.kv_budget_fraction={rollout.kv_budget_fraction} of engine.kv_tokens={settings.engine.kv_tokens} "
            f"does not hold one trajectory of model.max_context_tokens={context}, which would wait for ever; use "
            f"engine.kv_tokens={math.ceil(context / rollout.kv_budget_fraction)} or more",
        )


def _on(settings: Settings, choice: str) -> bool:
    return choice == "on" or (choice == "auto" and with_tiderl(settings.planner.policy))


def batches_tasks(settings: Settings) -> bool:
    """Whether turns wait until their trajectories may keep their KV: `rollout.task_batching`."""
    return _on(settings, settings.rollout.task_batching)


def follows_readiness(settings: Settings) -> bool:
    """Whether training GPUs are lent by how ready the data is: `planner.readiness`."""
    return _on(settings, settings.planner.readiness)


def _availability(settings: Settings) -> Iterator[Contradiction]:
    availability = settings.availability
    needs = {"trace": availability.trace, "control": availability.control_file or settings.control.http}
    if not needs.get(availability.source, "none needed"):
        key = "availability.trace" if availability.source == "trace" else "availability.control_file"
        other = "" if availability.source == "trace" else ", or set control.http=true"
        yield Contradiction(
            (key, "availability.source"),
            f'availability.source="{availability.source}" needs {key}; name a file{other}',
        )


def _policy(settings: Settings) -> Iterator[Contradiction]:
    policy, text = settings.planner.policy, settings.planner.configuration
    keys = ("planner.configuration", "planner.policy")
    if policy not in ("static_pd", "pinned", "fixed"):
        if text:
            yield Contradiction(
                keys,
                f'planner.policy="{policy}" chooses by itself; leave planner.configuration empty, or use "static_pd"',
            )
        return
    if policy == "fixed" and not text:
        return
    try:
        workers = Configuration.parse(text).workers
    except ConfigurationError as error:
        yield Contradiction(keys, f'planner.policy="{policy}" needs a planner.configuration: {error}')
        return
    if workers == 0:
        yield Contradiction(keys, "a configuration without workers cannot run; use at least 1C")


def _thresholds(settings: Settings) -> Iterator[Contradiction]:
    planner = settings.planner
    if planner.mode_threshold < planner.ratio_threshold:
        yield Contradiction(
            ("planner.mode_threshold", "planner.ratio_threshold"),
            f"a mode switch costs more than a change of the ratio, so its threshold cannot be lower; "
            f"use planner.mode_threshold={planner.ratio_threshold} or more",
        )


def _waits(settings: Settings) -> Iterator[Contradiction]:
    # Calls wait while the first workers start, and those of new samples for one that has loaded the newest weights.
    waits_s = settings.limits.rollout.no_worker_s
    for name, words in (("sync_s", "load weights that were just published"), ("start_s", "start")):
        takes_s = getattr(settings.limits.executor, name)
        if waits_s < takes_s:
            yield Contradiction(
                ("limits.rollout.no_worker_s", f"limits.executor.{name}"),
                f"workers may take limits.executor.{name}={takes_s:g} to {words}, and calls that wait for them would "
                f"be given up before; use limits.rollout.no_worker_s={takes_s:g} or more",
            )


def _sampling(settings: Settings) -> Iterator[Contradiction]:
    if settings.rollout.temperature == 0 and settings.train.learning_rate > 0:
        yield Contradiction(
            ("rollout.temperature", "train.learning_rate"),
            "greedy sampling makes the trajectories of a group equal, so that nothing is learned; "
            "use rollout.temperature=1.0, or train.learning_rate=0",
        )


def _ref_actor(settings: Settings) -> Iterator[Contradiction]:
    mode = settings.train.ref_actor
    if mode != "inline" and settings.train.kl_coefficient == 0:
        yield Contradiction(
            ("train.ref_actor", "train.kl_coefficient"),
            f'train.ref_actor="{mode}" says where a reference works, and train.kl_coefficient=0 keeps none; '
            'use train.kl_coefficient=0.01, or train.ref_actor="inline"',
        )
    if mode == "decoupled" and settings.cluster.training_gpus < 2:
        yield Contradiction(
            ("train.ref_actor", "cluster.training_gpus"),
            'train.ref_actor="decoupled" takes one training GPU for the reference and needs another one for the actor; '
            "use cluster.training_gpus=2 or more",
        )


def _ray(settings: Settings) -> Iterator[Contradiction]:
    for name in ("training_labels", "reserved_labels", "preemptible_labels"):
        try:
            parse_labels(getattr(settings.cluster.ray, name))
        except ValueError as error:
            yield Contradiction((f"cluster.ray.{name}",), str(error))
    if settings.cluster.ray.address and settings.cluster.runtime != "ray":
        yield Contradiction(
            ("cluster.ray.address", "cluster.runtime"),
            'names a cluster that nobody uses; set cluster.runtime="ray" too, or leave it empty',
        )
    if settings.availability.source == "ray" and (
        settings.cluster.runtime != "ray" or not settings.cluster.ray.preemptible_labels
    ):
        yield Contradiction(
            ("availability.source", "cluster.runtime", "cluster.ray.preemptible_labels"),
            'follows the nodes of a Ray cluster; set cluster.runtime="ray", and cluster.ray.preemptible_labels to what '
            'marks preemptible nodes, like "pearl.zone=elastic"',
        )


def _sglang(settings: Settings) -> Iterator[Contradiction]:
    engine = settings.engine
    if engine.kind != "sglang":
        return
    if not engine.sglang.interpreter:
        yield Contradiction(
            ("engine.sglang.interpreter", "engine.kind"),
            'workers need a Python that has SGLang; use engine.sglang.interpreter=["/path/to/python"]',
        )
    if not is_address(engine.sglang.host):
        yield Contradiction(
            ("engine.sglang.host",),
            f'engine.sglang.host="{engine.sglang.host}" is no IP address, and servers are held to one; use one like '
            '"127.0.0.1"',
        )
    if settings.device.paced:
        yield Contradiction(
            ("device.paced", "engine.kind"),
            "SGLang runs at the speed of its device and cannot be paced; use device.paced=false",
        )
    if settings.cluster.runtime == "ray" and engine.sglang.weights != "disk":
        yield Contradiction(
            ("engine.sglang.weights", "cluster.runtime"),
            f'engine.sglang.weights="{engine.sglang.weights}" reaches servers on this machine only; use "disk" with '
            'cluster.runtime="ray": weights then go through the object store to each node\'s disk',
        )
    for entry in engine.sglang.variables:
        if "=" not in entry:
            yield Contradiction(("engine.sglang.variables",), f'"{entry}" is no variable; write it as NAME=VALUE')


_RULES: tuple[Callable[[Settings], Iterator[Contradiction]], ...] = (
    _batch,
    _gpus,
    _tiny_model,
    _model_path,
    _resume,
    _tokens,
    _task_batching,
    _availability,
    _policy,
    _thresholds,
    _waits,
    _sampling,
    _ref_actor,
    _sglang,
    _ray,
)
