"""From settings to the parts of a run: one function a part, nothing started, nothing written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pearl_executor.availability import ControlFileSource, FixedSource, TraceSource, merge_sources, read_trace
from pearl_executor.availability_http import CommandSource
from pearl_executor.engines.torch.contract import EngineLimits
from pearl_executor.limits import Limits
from pearl_executor.pacing import Pace
from pearl_executor.ports import AvailabilitySource, Sampling
from pearl_executor.preemption.notice import NoticedGpus
from pearl_executor.preemption.sources import NOTICE_KINDS, notice_source
from pearl_executor.runtimes.local.fleet import Timeouts
from pearl_planner.decide import DecideSettings
from pearl_planner.elastic import Borrowing, ElasticSettings
from pearl_planner.gate import ToggleCosts
from pearl_planner.in_step import pearl_prorsa, prorsa
from pearl_planner.policies import Policy, colocated_elastic, fixed, pearl, pinned, static_pd, tiderl
from pearl_planner.readiness import fixed_batch
from pearl_planner.switching import SwitchCosts
from pearl_rl.own_policy import own_policy
from pearl_rl.preflight import trace_path
from pearl_rl.rollout.agent import Agent, AgentLimits
from pearl_rl.rollout.environments.protocol import EnvironmentSuite
from pearl_rl.rollout.evaluation import AnchoredEvaluation, EvaluationResult
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.rollout.pipeline_settings import Injection, PipelineSettings
from pearl_rl.rollout.readiness import ReadinessMonitor
from pearl_rl.rollout.router import Router, RouterLimits
from pearl_rl.rollout.serving import ServingLimits
from pearl_rl.rollout.task_gate import TaskGate, TaskGateLimits, batching_gate
from pearl_rl.settings import Settings
from pearl_rl.settings.labels import parse_labels
from pearl_rl.settings.names import injects_continuously
from pearl_rl.settings.root import batches_tasks, follows_readiness
from pearl_rl.training.options import (
    Aggregation,
    Baseline,
    ComputeDtype,
    LossOptions,
    OptimizerOptions,
    RefActor,
    TrainerOptions,
)
from pearl_rl.training.process import TrainerLimits
from pearl_state.configuration import Configuration
from pearl_state.events import Event
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Tenure


def pace(settings: Settings) -> Pace:
    """What the engines emulate; all zero where they are not paced."""
    if not settings.device.paced:
        return Pace()
    values = settings.device.model_dump(exclude={"paced", "training_update_s"})
    return Pace(**values)


def limits(settings: Settings) -> Limits:
    """Bounds of the executors."""
    return Limits(**settings.limits.executor.model_dump())


def engine_limits(settings: Settings) -> EngineLimits:
    """Sizes of one worker's engine."""
    return EngineLimits(
        max_running=settings.engine.max_running,
        kv_tokens=settings.engine.kv_tokens,
        prefill_chunk_tokens=settings.engine.prefill_chunk_tokens,
        max_context_tokens=settings.model.max_context_tokens,
    )


def timeouts(settings: Settings) -> Timeouts:
    """Bounds of the local runtime."""
    return Timeouts(start_s=settings.limits.executor.start_s, stop_s=settings.limits.executor.stop_s)


def router_limits(settings: Settings) -> RouterLimits:
    """Bounds of the router."""
    serving = ServingLimits(
        capacity_sequences=settings.engine.max_running,
        capacity_tokens=settings.engine.kv_tokens,
    )
    return RouterLimits(
        serving=serving,
        no_worker_s=settings.limits.rollout.no_worker_s,
        stall_s=settings.limits.rollout.stall_s,
        max_attempts=settings.rollout.max_attempts,
    )


def agent_limits(settings: Settings) -> AgentLimits:
    """Bounds of a trajectory."""
    return AgentLimits(
        turns=settings.rollout.max_turns,
        new_tokens=settings.rollout.max_new_tokens,
        context_tokens=settings.model.max_context_tokens,
        environment_s=settings.limits.rollout.environment_s,
    )


def sampling(settings: Settings) -> Sampling:
    """How responses are drawn."""
    return Sampling(temperature=settings.rollout.temperature, top_p=settings.rollout.top_p)


def policy(settings: Settings) -> Policy:
    """Who chooses the configuration."""
    planner = settings.planner
    held = Configuration.parse(planner.configuration) if planner.configuration else None
    if ":" in planner.policy:
        return own_policy(planner.policy)
    if planner.policy == "fixed":
        return fixed(held)
    if planner.policy == "colocated_elastic":
        return colocated_elastic()
    if held is not None:
        return static_pd(held) if planner.policy == "static_pd" else pinned(held)
    decide = DecideSettings(
        model=planner.model,
        ratio_threshold=planner.ratio_threshold,
        mode_threshold=planner.mode_threshold,
        prefill_load_limit=planner.prefill_load_limit,
        kv_headroom=planner.kv_headroom,
    )
    costs = SwitchCosts(
        flip_s=planner.flip_s,
        relaunch_s=planner.relaunch_s,
        new_worker_s=planner.new_worker_s,
        weight=planner.ema_weight,
    )
    persistence_s = _WINDOWS * planner.horizon_s
    match planner.policy:
        case "prorsa":
            return prorsa(costs, persistence_s=persistence_s)
        case "pearl+prorsa" | "pearl+prorsa+tiderl":
            return replace(pearl_prorsa(decide, costs, persistence_s=persistence_s), name=planner.policy)
        case "tiderl":
            return tiderl(decide, costs)
        case _:
            return replace(pearl(decide, costs), name=planner.policy)


_WINDOWS: Final = 3
"""Windows for which a forecast demand is taken to last at least."""


def elastic_settings(settings: Settings) -> ElasticSettings:
    """What bounds the Elastic Scheduler."""
    cluster = settings.cluster
    return ElasticSettings(
        policy=policy(settings),
        gpus_per_worker=cluster.gpus_per_worker,
        borrowing=Borrowing(cluster.borrowing),
        return_s=settings.limits.training.return_s,
        max_restarts=cluster.max_restarts,
        min_healthy=cluster.min_healthy,
        expansion_workers=cluster.expansion_workers,
    )


def toggle_costs(settings: Settings) -> ToggleCosts:
    """What a borrow is thought to cost before one was seen."""
    planner = settings.planner
    return ToggleCosts(
        prior_activation_s=planner.activation_s,
        prior_deactivation_s=planner.deactivation_s,
        weight=planner.ema_weight,
    )


def preemptible_gpus(settings: Settings) -> range:
    """Numbers of the GPUs that come and go: after training's and the reserved ones."""
    cluster = settings.cluster
    first = cluster.training_gpus + cluster.reserved_rollout_gpus
    return range(first, first + cluster.max_preemptible_gpus)


def people_gpus(settings: Settings) -> CommandSource | None:
    """Where people offer and reclaim preemptible GPUs through the control server; None where they do not."""
    source = settings.availability
    if source.source != "control" or source.control_file or not settings.cluster.max_preemptible_gpus:
        return None
    return CommandSource(gpus=preemptible_gpus(settings), notice_s=source.notice_s)


def availability(
    settings: Settings,
    nodes: dict[int, str] | None = None,
    people: AvailabilitySource | None = None,
    *,
    elapsed_s: float = 0.0,
) -> AvailabilitySource:
    """Reserved rollout GPUs for good, and preemptible ones as the settings say.

    GPUs are numbered: training first, then reserved rollout, then preemptible ones. `nodes` is filled with the node
    that each GPU is on, where the source follows nodes. `people` stands in for a control file. A trace goes on where it
    was after the run had been under way for `elapsed_s` seconds.
    """
    first, preemptible = settings.cluster.training_gpus, preemptible_gpus(settings)
    sources: list[AvailabilitySource] = []
    if preemptible.start > first:
        sources.append(FixedSource(range(first, preemptible.start)))
    if preemptible:
        sources.append(_preemptible(settings, preemptible, {} if nodes is None else nodes, people, elapsed_s))
    return merge_sources(*sources)


def _preemptible(
    settings: Settings, gpus: range, nodes: dict[int, str], people: AvailabilitySource | None, elapsed_s: float
) -> AvailabilitySource:
    """Who offers and reclaims `gpus`, as `availability.source` says."""
    source = settings.availability
    if source.source == "fixed":
        return FixedSource(gpus, tenure=Tenure.PREEMPTIBLE)
    if source.source == "ray":
        return _ray_nodes(settings, gpus, nodes)
    if source.source in NOTICE_KINDS:
        notices = notice_source(source.source, notice_s=source.notice_s, base=source.metadata_url)
        return NoticedGpus(notices, gpus=gpus)
    if source.source == "control":
        return people or ControlFileSource(Path(source.control_file), gpus=gpus, notice_s=source.notice_s)
    rows = read_trace(trace_path(settings), source.segment or None)
    peak = max(row.count for row in rows)
    start_s = source.start_s + elapsed_s * source.time_scale
    shifted = [(max(0.0, row.t_s - start_s), row.count) for row in rows]
    # Of the rows before the start only the last one counts.
    late = [row for row in shifted if row[0] > 0]
    early = [row for row in shifted if row[0] == 0]
    return TraceSource(
        [(0.0, early[-1][1]), *late] if early else late,
        gpus=gpus,
        time_scale=source.time_scale,
        notice_s=source.notice_s,
        seed=source.seed,
        scale=len(gpus) / peak if peak else 1.0,
    )


def _ray_nodes(settings: Settings, gpus: range, nodes: dict[int, str]) -> AvailabilitySource:
    from pearl_executor.runtimes.ray.availability import RayNodeSource, look_at_cluster, watch_node

    labels, notice_s = parse_labels(settings.cluster.ray.preemptible_labels), settings.availability.notice_s
    kind, base = settings.cluster.ray.notices, settings.availability.metadata_url
    return RayNodeSource(
        lambda: look_at_cluster(labels, notice_s),
        gpus=gpus,
        nodes=nodes,
        gpus_per_worker=settings.cluster.gpus_per_worker,
        watch=None if kind == "none" else lambda node: watch_node(node, kind, notice_s, base),
    )


def pipeline_settings(settings: Settings) -> PipelineSettings:
    """What the pipeline is to make."""
    continuous = injects_continuously(settings.rollout.injection, settings.planner.policy)
    return PipelineSettings(
        steps=settings.run.steps,
        groups_per_step=settings.train.groups_per_step,
        group_size=settings.train.group_size,
        max_staleness=settings.train.max_staleness_versions,
        injection=Injection.CONTINUOUS if continuous else Injection.BATCH,
        straggler_patience=settings.rollout.straggler_patience or math.inf,
        seed=settings.run.seed,
        wall_limit_s=settings.run.wall_limit_s,
        batch_s=settings.limits.rollout.batch_s,
        grant_s=settings.limits.training.grant_s,
        update_s=_longest_update_s(settings),
        max_refills_per_group=settings.rollout.max_refills,
    )


def task_gate(settings: Settings, router: Router, lifecycle: LifecycleTrace | None = None) -> TaskGate | None:
    """Continuous task batching in front of `router`; None where no turn waits for room."""
    if not batches_tasks(settings):
        return None
    context = settings.model.max_context_tokens
    limits = TaskGateLimits(
        kv_tokens=settings.engine.kv_tokens,
        budget_fraction=settings.rollout.kv_budget_fraction,
        growth_tokens=settings.rollout.max_new_tokens,
        wait_s=settings.limits.rollout.batch_s,
    )
    group_size = settings.train.group_size
    return batching_gate(router, limits, context_tokens=context, group_size=group_size, lifecycle=lifecycle)


_EVALUATION_SEED: Final = 0x5EED
"""What sets the tasks of evaluations apart from those of training."""


def evaluation(
    settings: Settings,
    router: Router,
    agent: Agent,
    suite: EnvironmentSuite,
    on_result: Callable[[EvaluationResult], None],
    gate: TaskGate | None,
) -> AnchoredEvaluation | None:
    """Evaluations beside training; None where none is wanted. Their tasks are drawn from a seed of their own."""
    chosen = settings.evaluation
    if not chosen.every_versions:
        return None
    return AnchoredEvaluation(
        router=router,
        agent=agent,
        tasks=suite.tasks(settings.run.seed ^ _EVALUATION_SEED),
        episodes=chosen.episodes,
        every=chosen.every_versions,
        seed=settings.run.seed,
        on_result=on_result,
        gate=gate,
        limit_s=chosen.limit_s,
    )


def readiness(
    settings: Settings, post: Callable[[Event], None], evaluations: AnchoredEvaluation | None
) -> ReadinessMonitor | None:
    """Measures how ready the data is at each update; None where that moves nothing."""
    if not follows_readiness(settings):
        return None
    return ReadinessMonitor(
        fixed_batch(settings.rollout.batch_size),
        group_size=settings.train.group_size,
        post=post,
        evaluates=lambda version: evaluations is not None and evaluations.due(version),
    )


def _longest_update_s(settings: Settings) -> float:
    """An update and the publication of its weights, with every restart of lost ranks on the way, seconds."""
    bounds, restarts = settings.limits.training, settings.cluster.max_restarts
    # `auto` may form the ranks anew each time, with their state written and read.
    formed = restarts + 1 if settings.train.ref_actor == "auto" else 0
    again_s = formed * (bounds.start_s + 2 * bounds.checkpoint_s)
    return (restarts + 1) * 2 * bounds.update_s + restarts * (bounds.start_s + bounds.checkpoint_s) + again_s


def trainer_options(settings: Settings) -> TrainerOptions:
    """Loss, optimizer and batching, and what the ranks compute on."""
    train = settings.train
    return TrainerOptions(
        loss=LossOptions(
            baseline=Baseline(train.baseline),
            aggregation=Aggregation(train.aggregation),
            truncation=train.importance_truncation,
            clip_low=train.clip_low if train.clip else None,
            clip_high=train.clip_high if train.clip else None,
            kl_coefficient=train.kl_coefficient,
            entropy_coefficient=train.entropy_coefficient,
            temperature=settings.rollout.temperature,
        ),
        optimizer=OptimizerOptions(
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            max_gradient_norm=train.max_gradient_norm,
            warmup_updates=train.warmup_updates,
        ),
        minibatches=train.minibatches,
        epochs=train.epochs,
        micro_batch_tokens=train.micro_batch_tokens,
        # Nothing is measured at first, and colocated needs no GPU of its own.
        ref_actor=RefActor.COLOCATED if train.ref_actor == "auto" else RefActor(train.ref_actor),
        reference_rank=train.ref_actor == "decoupled",
        dtype=ComputeDtype(settings.model.dtype),
        device=settings.engine.device,
        seed=settings.run.seed,
    )


def trainer_limits(settings: Settings) -> TrainerLimits:
    """Bounds of the trainer."""
    bounds = settings.limits.training
    return TrainerLimits(
        start_s=bounds.start_s,
        update_s=bounds.update_s,
        checkpoint_s=bounds.checkpoint_s,
        memory_s=bounds.memory_s,
    )


def prior_workload(settings: Settings) -> WorkloadProfile:
    """What is assumed of the workload before anything was measured; only the batch is known."""
    return WorkloadProfile(
        batch=settings.rollout.batch_size,
        turns=settings.rollout.max_turns,
        new_prompt_tokens=settings.rollout.max_new_tokens,
        response_tokens=settings.rollout.max_new_tokens,
        origin=dict.fromkeys(("turns", "new_prompt_tokens", "response_tokens"), "upper bound from the settings"),
    )


def prior_platform(settings: Settings, model_config: Mapping[str, Any]) -> PlatformProfile:
    """What is assumed of a worker before anything was measured: sizes are known, speeds are not."""
    heads = int(model_config.get("num_key_value_heads") or model_config["num_attention_heads"])
    head_dim = int(model_config.get("head_dim") or model_config["hidden_size"] // model_config["num_attention_heads"])
    element_bytes = 4 if settings.model.dtype == "float32" else 2
    kv_bytes = 2 * int(model_config["num_hidden_layers"]) * heads * head_dim * element_bytes
    speeds = ("decode_fixed_s", "decode_per_sequence_s", "prefill_per_token_s", "transfer_bytes_per_s")
    return PlatformProfile(
        decode_fixed_s=0.01,
        decode_per_sequence_s=0.001,
        prefill_per_token_s=0.001,
        kv_bytes_per_token=kv_bytes,
        transfer_bytes_per_s=1e9,
        kv_capacity_bytes=float(kv_bytes * settings.engine.kv_tokens),
        prefix_capacity_tokens=float(settings.engine.kv_tokens),
        origin={**dict.fromkeys(speeds, "guess before any measurement"), "kv_bytes_per_token": "model config"},
    )
