"""A scenario: model, GPUs, availability, workload, policy, and costs; from a TOML file, a bundled name, or code."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from pearl_planner.search import DecideSettings
from pearl_rl.errors import SettingsError
from pearl_rl.settings.job import Section
from pearl_rl.settings.keys import OF_SCENARIOS, leaves, sections
from pearl_rl.settings.load import parse_override
from pearl_rl.settings.messages import rule, short
from pearl_rl.settings.names import named_policy
from pearl_state.configuration import Configuration
from pearl_state.errors import ConfigurationError

POLICIES = (
    "roll",
    "roll-large",
    "rlboost",
    "bidirl",
    "static-pd",
    "pearl",
    "pearl-disaggregated",
    "pearl-ungated",
    "pearl-gated",
    "pearl-no-borrowing",
    "pearl-colocated",
    "prorsa",
    "pearl+prorsa",
    "tiderl",
    "pearl+tiderl",
    "pearl+prorsa+tiderl",
    "oracle",
)
"""Names of the bundled policies."""

BUNDLED = ("paper-segment1", "paper-segment2", "paper-segment3", "paper-fixed", "webshop", "weka", "hyperscale")
"""Names of the bundled scenarios."""


class ClusterSection(Section):
    """`[cluster]`: GPUs, by who may use them."""

    training_gpus: int = Field(default=16, ge=1, le=1_000_000, description="GPUs that training holds, and may lend")
    reserved_rollout_gpus: int = Field(default=4, ge=0, le=1_000_000, description="rollout GPUs that nobody takes away")
    max_preemptible_gpus: int = Field(default=12, ge=0, le=1_000_000, description="rollout GPUs that come and go")
    large_rollout_gpus: int = Field(
        default=0, ge=0, le=1_000_000, description="fixed pool of policy roll-large; 0: mean, rounded up"
    )


class AvailabilitySection(Section):
    """`[availability]`: when preemptible GPUs come and go."""

    trace: str = Field(
        default="",
        description="CSV trace of counts or of events; empty for the bundled segments; 'synthetic' for GPUs that come "
        "and go at random until run.duration_s, then stay as they are; 'none' for a fixed pool",
    )
    present_s: float = Field(
        default=3600.0, gt=0, le=1e9, description="mean time that a GPU of a synthetic trace is there, seconds"
    )
    absent_s: float = Field(
        default=1800.0, gt=0, le=1e9, description="mean time that a GPU of a synthetic trace is away, seconds"
    )
    segment: str = Field(default="segment1", description="segment of the trace; empty where it has none")
    notice_s: float = Field(default=30.0, ge=0, description="warning before a GPU is taken, seconds")
    time_scale: float = Field(default=1.0, gt=0, description="trace seconds that pass in one second")


class RolloutSection(Section):
    """`[rollout]`: what a step needs."""

    batch: int = Field(default=64, ge=1, le=10_000_000, description="trajectories of a step, B")
    group_size: int = Field(default=16, ge=1, le=100_000, description="trajectories of one task (GRPO group)")
    max_staleness: int = Field(default=1, ge=0, le=1000, description="weight versions between dispatch and use")
    injection: Literal["", "batch", "continuous"] = Field(
        default="", description="when groups are dispatched; empty: continuous for policies with tiderl, else batch"
    )
    straggler_patience: float | None = Field(
        default=None,
        ge=0,
        description="mean step times that an update waits for stragglers before it gives them up; 0: as long as "
        "needed; unset: 0.1 for policies with tiderl",
    )
    task_batching: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="whether a turn waits until its trajectory may keep its KV; auto: for policies with tiderl",
    )
    kv_budget_fraction: float = Field(
        default=0.9, gt=0, le=1, description="part of a worker's KV that trajectories under way may hold, with batching"
    )
    readiness: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="whether the readiness of data says if training GPUs are lent; auto: for policies with tiderl",
    )


class WorkloadSection(Section):
    """`[workload]`: what trajectories do."""

    model: str = Field(default="swe", description="turn model: swe, webshop, weka, or a JSON file")
    replay: str = Field(default="", description="replay instead: a run folder, or a WEKA trace CSV")
    max_context_tokens: int = Field(default=32_768, ge=16, le=100_000_000, description="longest trajectory, tokens")
    max_turns: int = Field(default=1000, ge=1, description="most turns of a trajectory")
    turns_scale: float | None = Field(
        default=None, gt=0, le=1e6, description="factor on turns; unset: the parameter set's"
    )
    turns_spread: float | None = Field(default=None, gt=0, le=10, description="exponent on turns around their median")
    first_prompt_scale: float | None = Field(default=None, gt=0, le=1e6, description="factor on the first prompt")
    prompt_scale: float | None = Field(default=None, gt=0, le=1e6, description="factor on new prompt tokens")
    response_scale: float | None = Field(default=None, gt=0, le=1e6, description="factor on generated tokens")
    tool_scale: float | None = Field(default=None, ge=0, le=1e6, description="factor on tool times")
    retained_fraction: float | None = Field(
        default=None, ge=0, le=1, description="part of the generated tokens that stays in the context"
    )
    stable_fraction: float | None = Field(
        default=None, ge=0, le=1, description="part of a prompt that the next one repeats"
    )
    reset_s: float | None = Field(default=None, ge=0, le=1e6, description="time until an environment is ready, seconds")


class PolicySection(Section):
    """`[policy]`: who chooses."""

    name: Annotated[str, named_policy(*POLICIES)] = Field(
        default="pearl", description="a bundled policy, or one of your own as module:attribute"
    )
    configuration: str = Field(default="", description="configuration of static-pd, like 3P5D")
    borrowing: Literal["", "off", "ungated", "gated"] = Field(
        default="", description="override of the policy's borrowing"
    )
    seeding_s: float = Field(
        default=0.0,
        ge=0,
        description="of rlboost: seconds after an update, and from the start, for which training GPUs join rollout",
    )
    model: Literal["extended", "printed"] = Field(default="extended", description="makespan model that decides")
    ratio_threshold: float | None = Field(default=None, ge=0, description="hysteresis of a ratio change, relative gain")
    mode_threshold: float | None = Field(default=None, ge=0, description="hysteresis of a mode change, relative gain")
    prior: Literal["simulated", "roofline"] = Field(
        default="simulated",
        description="platform profile at the start: short runs of the simulated engine, or a roofline",
    )

    @property
    def thresholds(self) -> tuple[float, float]:
        """Of a ratio and of a mode change, the planner's own where unset."""
        usual, ratio, mode = DecideSettings(), self.ratio_threshold, self.mode_threshold
        return (
            usual.ratio_threshold if ratio is None else ratio,
            usual.mode_threshold if mode is None else mode,
        )


class RunSection(Section):
    """`[run]`: for how long, and from which seed."""

    duration_s: float = Field(default=7200.0, gt=0, description="no batch begins after this time, seconds")
    steps: int = Field(default=0, ge=0, le=10_000_000, description="training steps; 0: as many as fit the duration")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of tasks, trajectories and reclaims")


class Scenario(Section):
    """Everything a simulation needs. Values that are not set come from the parameter set of the model."""

    name: str = Field(default="custom", description="name, for reports")
    about: str = Field(default="", description="one line for people")
    model: str = Field(default="qwen3-8b", description="model of the catalog")
    gpu: str = Field(default="h800", description="GPU of the catalog")
    tp: int = Field(default=2, ge=1, le=1024, description="GPUs of one rollout worker (tensor parallelism)")
    parameters: str = Field(default="paper", description="parameter set: costs that no kernel table has")
    cluster: ClusterSection = Field(default=ClusterSection(), description="GPUs")
    availability: AvailabilitySection = Field(default=AvailabilitySection(), description="preemptible GPUs")
    rollout: RolloutSection = Field(default=RolloutSection(), description="steps")
    workload: WorkloadSection = Field(default=WorkloadSection(), description="trajectories")
    policy: PolicySection = Field(default=PolicySection(), description="who chooses")
    run: RunSection = Field(default=RunSection(), description="length and seed")

    @model_validator(mode="after")
    def _consistent(self) -> "Scenario":
        size = self.rollout.group_size
        if self.rollout.batch % size:
            raise ValueError(f"rollout.batch = {self.rollout.batch} does not divide into groups of {size}")
        for key in ("training_gpus", "reserved_rollout_gpus", "max_preemptible_gpus", "large_rollout_gpus"):
            gpus = getattr(self.cluster, key)
            if gpus % self.tp and key != "max_preemptible_gpus":
                raise ValueError(f"cluster.{key} = {gpus} does not divide by tp = {self.tp}")
        if not self.cluster.reserved_rollout_gpus and self.policy.name in ("roll", "bidirl"):
            raise ValueError(f"policy {self.policy.name} needs cluster.reserved_rollout_gpus: it takes no others")
        ratio, mode = self.policy.thresholds
        if mode < ratio:
            raise ValueError(
                f"policy.mode_threshold = {mode} is below policy.ratio_threshold = {ratio}: a mode switch costs "
                "more than a change of the ratio; lower both or raise the first"
            )
        self._check_seeding()
        if self.policy.name == "static-pd" and not self.policy.configuration:
            raise ValueError("policy static-pd needs policy.configuration, like 3P5D")
        try:
            if self.policy.configuration and not Configuration.parse(self.policy.configuration).workers:
                raise ValueError(f"policy.configuration = {self.policy.configuration}: has no worker")
        except ConfigurationError as error:
            raise ValueError(f"policy.configuration: {error}") from None
        return self

    def _check_seeding(self) -> None:
        if self.policy.name != "rlboost" or not self.policy.seeding_s:
            return
        seeding = f"policy.seeding_s = {self.policy.seeding_s:g}"
        if self.policy.borrowing == "off":
            raise ValueError(f"{seeding}: nothing is seeded with policy.borrowing = off; leave one of them out")
        if self.rollout.injection == "continuous":
            raise ValueError(
                f"{seeding}: with rollout.injection = continuous no batch begins that could be seeded; leave one out"
            )


def load_scenario(source: str, overrides: Sequence[str] = ()) -> Scenario:
    """A bundled name or a TOML file, with `key=value` overrides. Raises `SettingsError`, one line."""
    document, where = _document(source)
    for text in overrides:
        path, value = parse_override(text)
        node = document
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise SettingsError(f"--set {short(text)}: {part} is no section")
        node[path[-1]] = value
    document.setdefault("name", Path(source).stem)
    return scenario_from(document, where)


def scenario_from(document: Mapping[str, Any], where: str = "scenario") -> Scenario:
    """A scenario from nested tables. Raises `SettingsError`, one line."""
    for path in _paths(document):
        if path in _SECTIONS and path not in _KEYS:
            raise SettingsError(f"{where}: {'.'.join(path)}: is a section; set its keys")
        if path not in _KEYS:
            near = _OF_JOBS.get(path) or max(
                _KEYS, key=lambda key: SequenceMatcher(None, ".".join(path), ".".join(key)).ratio()
            )
            theirs = path in leaves() or path in sections()
            other = "; it is a setting of `pearl-rl train`, and this must be a scenario" if theirs else ""
            raise SettingsError(f"{where}: unknown key {short('.'.join(path))}; the nearest is {'.'.join(near)}{other}")
    try:
        return Scenario.model_validate(_as_floats(document))
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=True)[0]
        path = tuple(str(part) for part in detail["loc"])
        if not path:
            raise SettingsError(f"{where}: {str(detail['msg']).removeprefix('Value error, ')}") from None
        value = short(detail.get("input"))
        raise SettingsError(f"{where}: {'.'.join(path)} = {value}: {rule(path, detail)}") from None


def _document(source: str) -> tuple[dict[str, Any], str]:
    if source in BUNDLED:
        text = (files("pearl_rl.simulation") / "data" / "scenarios" / f"{source}.toml").read_text(encoding="utf-8")
        return tomllib.loads(text), source
    path = Path(source)
    if path.suffix != ".toml":
        near = max(BUNDLED, key=lambda name: SequenceMatcher(None, source, name).ratio())
        raise SettingsError(
            f"no scenario '{short(source)}': give a TOML file, or one of {', '.join(BUNDLED)} (nearest: {near})"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig")), source
    except OSError as error:
        raise SettingsError(f"{source}: cannot be read ({error.strerror}); give a TOML file") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{source}: is not valid TOML: {error}") from None


def _paths(document: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in document.items():
        path = (*prefix, key)
        if isinstance(value, Mapping) and (path in _SECTIONS or (value and path not in _KEYS)):
            yield from _paths(value, path)
        else:
            yield path


def _known(section: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield (*prefix, name), True
            yield from _known(annotation, (*prefix, name))
        else:
            yield (*prefix, name), False


_SECTIONS = frozenset(path for path, section in _known(Scenario) if section)
_KEYS = frozenset(path for path, section in _known(Scenario) if not section)
_OF_JOBS = {job: own for own, job in OF_SCENARIOS.items()}
_NUMBERS = frozenset(
    (*prefix, name)
    for prefix, section in (((s,), f.annotation) for s, f in Scenario.model_fields.items() if (s,) in _SECTIONS)
    for name, field in section.model_fields.items()  # type: ignore[union-attr]
    if "float" in str(field.annotation)
)


def _as_floats(document: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Whole numbers where a number is wanted: TOML tells 1 from 1.0, people do not."""
    converted: dict[str, Any] = {}
    for key, value in document.items():
        path = (*prefix, key)
        if isinstance(value, Mapping):
            converted[key] = _as_floats(value, path)
        elif path in _NUMBERS and isinstance(value, int) and not isinstance(value, bool):
            converted[key] = float(value)
        else:
            converted[key] = value
    return converted
