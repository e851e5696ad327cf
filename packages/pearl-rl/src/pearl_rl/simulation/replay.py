"""A recorded training run in the simulator: its turns, tokens, environment times, updates and GPUs, as they were.

The control plane is the production one under the run's own settings; workers cost what the run's emulated device costs
or, where it was not paced, what its telemetry was fitted to. With other settings it answers what would have been.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from pearl_executor.availability import AvailabilityEvent, FixedSource, merge_sources
from pearl_executor.ports import AvailabilitySource
from pearl_planner.catalog import find_gpu, find_model
from pearl_planner.elastic import Borrowing, ElasticState, initial_state
from pearl_rl import parts
from pearl_rl.encoding import decode_event
from pearl_rl.errors import CommandError, ExitCode, SettingsError
from pearl_rl.report.lines import of_run, read_lines, read_object, step_of
from pearl_rl.report.table_history import lanes, snapshots
from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.rollout.pipeline_settings import PipelineSettings
from pearl_rl.run_folder import CONFIG_JSON, RunFolder
from pearl_rl.run_of_train import require_run
from pearl_rl.settings import Settings, load_settings
from pearl_rl.simulation.cluster import SimulatedCluster
from pearl_rl.simulation.kernels import DecodeCurve, IterationOverheads
from pearl_rl.simulation.parameters import EngineParameters, LinkParameters, Parameters
from pearl_rl.simulation.policies import PolicySetup
from pearl_rl.simulation.requests import SimulatedEngineLimits
from pearl_rl.simulation.scenario import Scenario, scenario_from
from pearl_rl.simulation.sources import run_scripts
from pearl_rl.simulation.times import ReconfigurationTimes
from pearl_rl.simulation.training import TrainingTimes
from pearl_rl.simulation.workload import Script, WorkloadOptions
from pearl_state.events import GpusOffered, GpusReclaimed, ProfileRefitted
from pearl_state.profile import PlatformProfile
from pearl_state.roles import Tenure
from pearl_state.worker import GpuId

_UNLIMITED_BYTES_PER_S = 1e15
_TRACE_KEYS = ("source", "trace", "segment", "time_scale", "start_s", "seed", "control_file")


class PacedCosts:
    """`IterationCosts` of a device of the paper's form: A + b·n a decode iteration, t_prefill a prompt token."""

    def __init__(self, decode_fixed_s: float, decode_per_sequence_s: float, prefill_per_token_s: float) -> None:
        self._fixed_s = decode_fixed_s
        self._each_s = decode_per_sequence_s
        self._token_s = prefill_per_token_s

    def prefill_s(
        self, chunks: Sequence[tuple[int, int]], finished: int, sequences: int = 0, context_tokens: float = 0.0
    ) -> float:
        """See `IterationCosts`."""
        del finished, context_tokens
        decode_s = self._fixed_s + self._each_s * sequences if sequences else 0.0
        return max(1e-6, self._token_s * sum(tokens for tokens, _ in chunks) + decode_s)

    def decode_curve(self, sequences: int) -> DecodeCurve:
        """See `IterationCosts`; contexts cost nothing."""
        return DecodeCurve([0.0, 1e9], [0.0, 0.0], max(1e-6, self._fixed_s + self._each_s * sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedUpdates(TrainingTimes):
    """Updates that take what they took in the run, in order; the last one's time when they are used up."""

    durations_s: tuple[float, ...]
    numbers: Iterator[int] = field(default_factory=count, compare=False)
    """0, 1, …: the update that comes next."""

    def update_s(self, tokens: int, gpus: int) -> float:
        """The next update, seconds."""
        del tokens, gpus
        return self.durations_s[min(next(self.numbers), len(self.durations_s) - 1)]


class RecordedWorkload:
    """The run's own trajectories by their number; one that was not recorded plays the next that was."""

    stable_fraction = 1.0

    def __init__(self, scripts: Mapping[int, Script]) -> None:
        self._scripts = scripts
        self._order = sorted(scripts)

    def script(self, task: Task, sample: int) -> Script:
        """See `Workload`."""
        del task
        known = self._scripts.get(sample)
        return known if known is not None else self._scripts[self._order[sample % len(self._order)]]


class RecordedSource:
    """Offers and reclaims of GPUs when the run had them. A GPU is offered again only once it was returned."""

    def __init__(self, events: Sequence[AvailabilityEvent]) -> None:
        self._events = events
        self._owed: set[GpuId] = set()
        self._changed = asyncio.Event()

    async def events(self) -> AsyncIterator[AvailabilityEvent]:
        """In their order, at their times or later."""
        loop = asyncio.get_running_loop()
        for event in self._events:
            await asyncio.sleep(max(0.0, event.now_s - loop.time()))
            now_s = loop.time()
            if isinstance(event, GpusReclaimed):
                self._owed |= event.gpus
                yield replace(event, now_s=now_s, deadline_s=now_s + event.deadline_s - event.now_s)
                continue
            while event.gpus & self._owed:
                self._changed.clear()
                await self._changed.wait()
            yield replace(event, now_s=loop.time())

    def returned(self, gpus: frozenset[GpuId]) -> None:
        """See `AvailabilitySource`."""
        self._owed -= gpus
        self._changed.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run that can be replayed."""

    path: Path
    settings: Settings
    """With whatever was changed."""
    changed: frozenset[str]
    """Dotted keys that were changed."""
    steps: Sequence[Mapping[str, Any]]
    """Lines of `metrics.jsonl`."""
    availability: Sequence[AvailabilityEvent]
    """From time 0 on."""
    platform: PlatformProfile | None
    """What the run's telemetry was last fitted to."""
    model_config: Mapping[str, Any]
    training_release_s: float
    training_resume_s: float
    missing: int = 0
    """Trajectories that were trained on and are not recorded."""
    slowdown: float = 1.0
    """Factor on the cost of iterations: an emulated device is slower than stated where its machine is busy."""


def read_recorded(path: Path, overrides: Sequence[str] = (), slowdown: float = 1.0) -> Recorded:
    """The run in folder `path`, with `key=value` overrides of its settings.

    Raises `SettingsError` for a bad override, `CommandError` for a folder that holds no run of `pearl-rl train`, or a
    damaged one.
    """
    config = require_run(path)
    with of_run(path):
        return _read_recorded(path, config, overrides, slowdown)


def _read_recorded(path: Path, config: Path, overrides: Sequence[str], slowdown: float) -> Recorded:
    steps = [step_of(line) for line in read_lines(path / "metrics.jsonl")]
    if not steps:
        raise CommandError(f"{path}: no step of this run is complete, so that nothing can be replayed")
    for step in steps:
        for name in ("duration_s", "rollout_s", "training_s"):
            if step[name] < 0:
                raise ValueError(f"{name} = {step[name]} of step {step['step']}")
    # Where a run was resumed from has no part in its replay, and may be gone.
    settings = load_settings(config, [*overrides, 'run.resume_from=""']).settings
    before = read_object(path / CONFIG_JSON)["settings"]
    changed = frozenset(_differences(before, settings.model_dump(mode="json"))) - {"run.resume_from"}
    lines = list(read_lines(path / "events.jsonl"))
    if not lines:
        raise CommandError(f"{path}: has no events.jsonl with events: when its GPUs came and went is not known")
    events = [decode_event(line) for line in lines if line["event"] in _READ]
    fits = [event.platform for event in events if isinstance(event, ProfileRefitted) and event.calibrated]
    gpus = [event for event in events if isinstance(event, GpusOffered | GpusReclaimed)]
    release_s, resume_s = _training_times(path, settings)
    return Recorded(
        path=path,
        settings=settings,
        changed=changed,
        steps=steps,
        availability=_from_zero(gpus),
        platform=fits[-1] if fits else None,
        model_config=_model_config(path, settings),
        training_release_s=release_s,
        training_resume_s=resume_s,
        missing=max(0, sum(step["trajectories"] for step in steps) - _played(path)),
        slowdown=slowdown,
    )


def _played(path: Path) -> int:
    return sum(1 for _ in read_lines(path / "trajectories.jsonl"))


_READ = frozenset({"GpusOffered", "GpusReclaimed", "ProfileRefitted"})


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in after.items():
        # A setting that is newer than the run had no other value in it.
        key, old = f"{prefix}{name}", before.get(name, value)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            found += _differences(old, value, f"{key}.")
        elif value != old:
            found.append(key)
    return found


def _from_zero(events: Sequence[AvailabilityEvent]) -> list[AvailabilityEvent]:
    if not events:
        return []
    zero = events[0].now_s
    shifted: list[AvailabilityEvent] = []
    for event in events:
        if isinstance(event, GpusReclaimed):
            shifted.append(replace(event, now_s=event.now_s - zero, deadline_s=event.deadline_s - zero))
        else:
            shifted.append(replace(event, now_s=event.now_s - zero))
    return shifted


def _model_config(path: Path, settings: Settings) -> Mapping[str, Any]:
    folder = path / "model" if settings.model.path == "tiny" else Path(settings.model.path)
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{folder}: its config.json cannot be read ({error}); replay needs the model's shape"
        ) from None
    return config


def _training_times(path: Path, settings: Settings) -> tuple[float, float]:
    """How long training took to give its memory back and to take it again, seconds; by settings where it never did."""
    found: dict[str, list[float]] = {"draining": [], "resuming": []}
    for lane in lanes(snapshots(read_lines(path / "table.jsonl")), math.inf):
        if lane.group == "training":
            for span in lane.spans:
                if span.state in found and span.end_s < math.inf:
                    found[span.state].append(span.end_s - span.start_s)
    device = settings.device
    defaults = {"draining": device.release_s, "resuming": device.resume_s}
    release_s, resume_s = (fmean(values) if values else defaults[name] for name, values in found.items())
    return release_s, resume_s


class ReplayedCluster(SimulatedCluster):
    """A cluster in virtual time that is a recorded run's."""

    def __init__(self, recorded: Recorded, folder: RunFolder | None = None) -> None:
        # Nothing of a scenario's own parts applies: all of them come from the run.
        settings = recorded.settings
        self._recorded = recorded
        self.folder = folder
        self.on_control = []
        self.scenario = replay_scenario(recorded)
        self.gpu = find_gpu("h800")
        self._prior = parts.prior_platform(settings, recorded.model_config)
        self.kv_bytes = float(self._prior.kv_bytes_per_token)
        self.model = replace(find_model("qwen3-8b"), name=settings.model.path, kv_bytes_per_token=self.kv_bytes)
        self.parameters = self._parameters()
        self.costs = self._costs()
        self.limits = SimulatedEngineLimits(
            kv_tokens=settings.engine.kv_tokens,
            chunk_tokens=settings.engine.prefill_chunk_tokens,
            max_running=settings.engine.max_running,
            reserve_tokens=settings.rollout.max_new_tokens,
            phase_switch_s=settings.device.phase_switch_s * recorded.slowdown if settings.device.paced else 0.0,
        )
        self.workload = RecordedWorkload(_scripts(recorded))
        self.trace = ()
        cluster, policy = settings.cluster, parts.policy(settings)
        self.setup = PolicySetup(
            policy=policy,
            borrowing=Borrowing(cluster.borrowing),
            reserved_gpus=cluster.reserved_rollout_gpus,
            preemptible_gpus=cluster.max_preemptible_gpus,
        )

    def _costs(self) -> PacedCosts:
        stated: Any = self._recorded.settings.device
        if not stated.paced:
            stated = self._recorded.platform
        if stated is None:
            raise CommandError(
                f"{self._recorded.path}: was not paced, and ended before its telemetry was fitted to: "
                "what its workers cost is not known",
                ExitCode.INFEASIBLE,
            )
        factor = self._recorded.slowdown
        return PacedCosts(
            stated.decode_fixed_s * factor, stated.decode_per_sequence_s * factor, stated.prefill_per_token_s * factor
        )

    def _parameters(self) -> Parameters:
        recorded = self._recorded
        device, size = recorded.settings.device, recorded.settings.cluster.gpus_per_worker
        rate = device.kv_bytes_per_s or _UNLIMITED_BYTES_PER_S
        if not device.paced and recorded.platform is not None:
            rate = recorded.platform.transfer_bytes_per_s
        names = {item.name for item in fields(ReconfigurationTimes)}
        paced = {name: getattr(device, name) for name in ("start_s", "resume_s", "release_s") if device.paced}
        times = ReconfigurationTimes(
            **{
                **dict.fromkeys(names, 0.0),
                **paced,
                "first_load_s": device.load_s,
                "sync_s": device.load_s,
                "sync_pause_s": device.load_s,
                "flip_s": device.switch_s,
                "relaunch_s": device.switch_s,
                "training_release_s": recorded.training_release_s,
                "training_resume_s": recorded.training_resume_s,
            }
        )
        return Parameters(
            times=times,
            training=RecordedUpdates(
                gpu_s_per_token=0.0, durations_s=tuple(step["training_s"] for step in recorded.steps)
            ),
            engine=EngineParameters(),
            links=LinkParameters(bytes_per_s_per_gpu=rate / size, latency_s=device.handover_s if device.paced else 0.0),
            overheads=IterationOverheads(),
            workload={},
            origin={"all": f"recorded in {recorded.path}"},
        )

    def _initial_state(self) -> ElasticState:
        settings = self._recorded.settings
        return initial_state(
            settings=parts.elastic_settings(settings),
            workload=parts.prior_workload(settings),
            platform=self._prior,
            training_gpus=settings.cluster.training_gpus,
            toggle_costs=parts.toggle_costs(settings),
        )

    def _pipeline_settings(self) -> PipelineSettings:
        settings, steps = self._recorded.settings, len(self._recorded.steps)
        wanted = settings.run.steps if "run.steps" in self._recorded.changed else steps
        return replace(
            parts.pipeline_settings(settings), steps=wanted, wall_limit_s=math.inf, batch_s=86_400.0, grant_s=3600.0
        )

    def _availability(self) -> AvailabilitySource:
        settings, recorded = self._recorded.settings, self._recorded
        if any(f"availability.{key}" in recorded.changed for key in _TRACE_KEYS):
            return parts.availability(settings)
        cluster = settings.cluster
        first = cluster.training_gpus
        if "cluster.training_gpus" in recorded.changed:
            raise SettingsError(
                "cluster.training_gpus: recorded updates took what they took on the run's own training GPUs; "
                "replay cannot change their number"
            )
        reserved = frozenset(GpuId(gpu) for gpu in range(first, first + cluster.reserved_rollout_gpus))
        seen = frozenset(gpu for event in recorded.availability for gpu in event.gpus if _preemptible(event))
        kept, extra = _pool(seen, cluster.max_preemptible_gpus, first + 1_000)
        sources: list[AvailabilitySource] = []
        if reserved:
            sources.append(FixedSource(sorted(reserved)))
        events = [cut for event in recorded.availability if (cut := _cut(event, kept)) is not None]
        if events:
            sources.append(RecordedSource(events))
        if extra:
            sources.append(FixedSource(sorted(extra), tenure=Tenure.PREEMPTIBLE))
        return merge_sources(*sources)


def _preemptible(event: AvailabilityEvent) -> bool:
    return isinstance(event, GpusReclaimed) or event.tenure is Tenure.PREEMPTIBLE


def _pool(seen: frozenset[GpuId], size: int, first_new: int) -> tuple[frozenset[GpuId], frozenset[GpuId]]:
    """Which recorded GPUs stay in a pool of `size`, and which new ones fill it up. New ones are never taken away."""
    kept = sorted(seen)[:size]
    extra = range(first_new, first_new + size - len(kept))
    return frozenset(kept), frozenset(GpuId(gpu) for gpu in extra)


def _cut(event: AvailabilityEvent, kept: frozenset[GpuId]) -> AvailabilityEvent | None:
    """What an event says of the GPUs that are kept, None where nothing."""
    gpus = event.gpus & kept if _preemptible(event) else frozenset[GpuId]()
    return replace(event, gpus=gpus) if gpus else None


def _scripts(recorded: Recorded) -> dict[int, Script]:
    """The run's trajectories. What a call took beside its engine counts as time of the environment after it."""
    with of_run(recorded.path):
        return _read_scripts(recorded)


def _read_scripts(recorded: Recorded) -> dict[int, Script]:
    lines = sorted(read_lines(recorded.path / "trajectories.jsonl"), key=lambda line: str(line["id"]))
    if not lines:
        raise CommandError(f"{recorded.path}: has no trajectories to replay")
    moved: dict[str, float] = {}
    for request in read_lines(recorded.path / "requests.jsonl"):
        turn = request["rid"].rpartition(".")[0]
        moved[turn] = moved.get(turn, 0.0) + request["transfer_s"]
    options = WorkloadOptions(max_context_tokens=recorded.settings.model.max_context_tokens)
    scripts: dict[int, Script] = {}
    for line, script in zip(lines, run_scripts(recorded.path, options), strict=True):
        turns = tuple(
            replace(played, tool_s=played.tool_s + _beside_s(turn, moved.get(f"{line['id']}.{number:04d}", 0.0)))
            for number, (played, turn) in enumerate(zip(script.turns, line["turns"], strict=False))
        )
        reset_s = float(line.get("info", {}).get("reset_s", 0.0))
        scripts[int(line["id"][1:])] = replace(script, turns=turns, reset_s=reset_s)
    return scripts


def _beside_s(turn: Mapping[str, Any], transfer_s: float) -> float:
    """What a call took beyond queue, prefill, hand-over and decode; an interrupted one also waited for workers."""
    if turn["interruptions"]:
        return 0.0
    engine_s: float = turn["queue_s"] + turn["prefill_s"] + turn["decode_s"] + transfer_s
    call_s: float = turn["finished_s"] - turn["started_s"]
    return max(0.0, call_s - engine_s)


def replay_scenario(recorded: Recorded) -> Scenario:
    """The run's settings as a scenario: for its name and figures; what is simulated comes from the run itself."""
    settings = recorded.settings
    cluster, planner = settings.cluster, settings.planner
    names = {"colocated_elastic": "rlboost", "static_pd": "static-pd", "fixed": "roll"}
    policy: dict[str, Any] = {"name": names.get(planner.policy, "pearl")}
    if planner.policy == "static_pd":
        policy["configuration"] = planner.configuration
    if policy["name"] == "roll" and not cluster.reserved_rollout_gpus:
        policy["name"] = "rlboost"
    return scenario_from(
        {
            "name": f"replay of {recorded.path.resolve().name}",
            "about": ", ".join(sorted(recorded.changed)),
            "model": settings.model.path,
            "gpu": "emulated device" if settings.device.paced else "measured device",
            "tp": cluster.gpus_per_worker,
            "cluster": {
                "training_gpus": cluster.training_gpus,
                "reserved_rollout_gpus": cluster.reserved_rollout_gpus,
                "max_preemptible_gpus": cluster.max_preemptible_gpus,
            },
            "rollout": {
                "batch": settings.rollout.batch_size,
                "group_size": settings.train.group_size,
                "max_staleness": settings.train.max_staleness_versions,
            },
            "policy": policy,
            "run": {"steps": len(recorded.steps), "seed": settings.run.seed},
        },
        str(recorded.path),
    )
