"""Fits the planner's parameters to telemetry samples (PEARL section 4.3.2), and says what it could not fit.

Too few samples, or samples too alike, do not carry a line: such a field keeps its prior value, and `refused` names the
reason. A sample that is not a number is an error, since it means a broken meter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from pearl_planner.makespan import MakespanModel, PrintedModel
from pearl_planner.robust import Floats, clipped_mean, robust_line, robust_plane, weighted_median
from pearl_planner.steady import deciding_model
from pearl_state.configuration import Configuration
from pearl_state.errors import ProfileError
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode
from pearl_state.samples import DecodeSample, PrefillSample, TransferSample, TurnSample


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How much data a fit needs."""

    least_samples: int = 12
    """Samples of a kind; for decode, iterations."""
    least_distinct: int = 3
    """Distinct batch sizes (or sizes of hand-overs) that a line needs."""
    least_spread: float = 1.5
    """Quotient of the largest over the smallest of them."""
    least_turns: int = 8
    """Turns that workload statistics need."""
    least_steps: int = 2
    """Steps that T_over needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformFit:
    """A fitted platform profile."""

    profile: PlatformProfile
    used: Mapping[str, int] = field(default_factory=dict[str, int])
    """Fitted field → number of samples behind it."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Field that keeps its prior → why."""
    residuals: Mapping[str, float] = field(default_factory=dict[str, float])
    """`decode`, `prefill`, `transfer` → median relative deviation of samples from the fit."""

    @property
    def calibrated(self) -> bool:
        """Whether A, b and t_prefill all rest on measurements."""
        return {"decode_fixed_s", "decode_per_sequence_s", "prefill_per_token_s"} <= self.used.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFit:
    """A fitted workload profile."""

    profile: WorkloadProfile
    used: Mapping[str, int] = field(default_factory=dict[str, int])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """One measured step: the configurations that it ran under, each with the seconds for which it was in force."""

    segments: tuple[tuple[Configuration, float], ...]

    @property
    def makespan_s(self) -> float:
        """Duration of the step, seconds."""
        return math.fsum(seconds for _, seconds in self.segments)

    @property
    def mode(self) -> Mode | None:
        """The mode that was in force for at least `MOSTLY` of the step; None where none was."""
        for mode in Mode:
            share = math.fsum(seconds for configuration, seconds in self.segments if configuration.mode is mode)
            if share >= MOSTLY * self.makespan_s:
                return mode
        return None


MOSTLY: Final = 0.8


class _Values:
    """Fitted values, and refusals, while they are collected."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.used: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.residuals: dict[str, float] = {}

    def take(self, name: str, value: float, count: int) -> None:
        self.values[name] = value
        self.used[name] = count

    def refuse(self, reason: str, *names: str) -> None:
        self.refused.update(dict.fromkeys(names, reason))


def fit_platform(
    *,
    decode: Sequence[DecodeSample] = (),
    prefill: Sequence[PrefillSample] = (),
    transfer: Sequence[TransferSample] = (),
    prior: PlatformProfile,
    settings: FitSettings = FitSettings(),
) -> PlatformFit:
    """A and b from decode iterations, t_prefill from prefill iterations, BW, K and the hand-over cost from transfers.

    Robust against outliers. Raises `ProfileError` for a sample that is not finite or out of range.
    """
    found = _Values()
    _fit_decode(decode, found, settings)
    _fit_prefill(prefill, found, settings)
    _fit_transfer(transfer, prior, found, settings)
    origin = {**prior.origin, **{name: f"telemetry, {count} samples" for name, count in found.used.items()}}
    return PlatformFit(
        profile=replace(prior, **found.values, origin=origin),
        used=found.used,
        refused=found.refused,
        residuals=found.residuals,
    )


def _column(kind: str, name: str, values: Sequence[float], *, least: float = 0.0) -> Floats:
    """`values` as an array; raises `ProfileError` for the first that is not finite or below `least`."""
    column = np.array(values, dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(column) & (column >= least)))
    if len(bad):
        at = int(bad[0])
        raise ProfileError(f"{kind} sample {at}: {name} = {values[at]}: must be a finite number of at least {least:g}")
    return column


def _too_alike(x: Floats, what: str, settings: FitSettings) -> str | None:
    """Why a line over `x` would extrapolate; None where it would not."""
    # Not np.unique, which imports masked arrays at its first call.
    distinct = len(set(x.tolist()))
    if distinct < settings.least_distinct:
        return f"only {distinct} distinct {what}, a line needs {settings.least_distinct}"
    low, high = float(x.min()), float(x.max())
    if high < settings.least_spread * low:
        return f"{what} lie within {low:g}..{high:g}, a line needs a spread of {settings.least_spread:g}x"
    return None


def _fit_decode(samples: Sequence[DecodeSample], found: _Values, settings: FitSettings) -> None:
    names = ("decode_fixed_s", "decode_per_sequence_s")
    sequences = _column("decode", "sequences", [s.sequences for s in samples], least=1)
    iterations = _column("decode", "iterations", [s.iterations for s in samples], least=1)
    duration = _column("decode", "duration_s", [s.duration_s for s in samples])
    count = int(iterations.sum())
    if count < settings.least_samples:
        found.refuse(f"{count} decode iterations, needs {settings.least_samples}", *names)
        return
    reason = _too_alike(sequences, "batch sizes", settings)
    if reason:
        found.refuse(reason, *names)
        return
    each = duration / iterations
    contexts = _column("decode", "context_tokens", [s.context_tokens for s in samples])
    if _fit_contexts(sequences, contexts, each, iterations, found):
        return
    fixed, slope, residual = robust_line(sequences, each, iterations)
    if slope < 0:
        fixed, slope = weighted_median(each, iterations), 0.0
    if fixed <= 0:
        # A line through the origin: the data show no fixed cost.
        slope = weighted_median(each / sequences, iterations)
        fixed = 1e-3 * float(each.min()) + 1e-9
    found.take("decode_fixed_s", fixed, count)
    found.take("decode_per_sequence_s", slope, count)
    found.residuals["decode"] = residual


def _fit_contexts(sequences: Floats, contexts: Floats, each: Floats, iterations: Floats, found: _Values) -> bool:
    """A and b where samples tell contexts: attention reads all of them. b is that of the mean context.

    Few sequences are left when contexts are longest, so that a line over the number of sequences alone takes part of
    what contexts cost for a fixed cost. False, and nothing taken, where the samples do not tell both apart.
    """
    if not len(contexts) or contexts.min() <= 0:
        return False
    read = sequences * contexts
    plane = robust_plane(np.column_stack([np.ones(len(read)), sequences, read]), each, iterations)
    if plane is not None and plane[0][1] < 0:
        plane = robust_plane(np.column_stack([np.ones(len(read)), read]), each, iterations)
        if plane is not None:
            plane = np.insert(plane[0], 1, 0.0), plane[1]
    if plane is None or plane[0].min() < 0 or plane[0][0] <= 0:
        return False
    (fixed, slope, reading), residual = plane
    count = int(iterations.sum())
    found.take("decode_fixed_s", float(fixed), count)
    found.take(
        "decode_per_sequence_s", float(slope + reading * np.average(contexts, weights=sequences * iterations)), count
    )
    found.residuals["decode"] = residual
    return True


def _fit_prefill(samples: Sequence[PrefillSample], found: _Values, settings: FitSettings) -> None:
    tokens = _column("prefill", "tokens", [s.tokens for s in samples])
    duration = _column("prefill", "duration_s", [s.duration_s for s in samples])
    computed = tokens > 0
    tokens, duration = tokens[computed], duration[computed]
    if len(tokens) < settings.least_samples:
        found.refuse(f"{len(tokens)} prefill iterations, needs {settings.least_samples}", "prefill_per_token_s")
        return
    each = duration / tokens
    # The cost of a token at the sizes that occur: large iterations count for as many tokens as they hold.
    per_token = weighted_median(each, tokens)
    if per_token <= 0:
        found.refuse("prefill iterations took no time", "prefill_per_token_s")
        return
    found.take("prefill_per_token_s", per_token, len(tokens))
    found.residuals["prefill"] = weighted_median(np.abs(each - per_token), tokens) / per_token
    reason = _too_alike(tokens, "prefill sizes", settings)
    if reason:
        found.refuse(reason, "prefill_fixed_s")
        return
    fixed, slope, _ = robust_line(tokens, duration, np.ones(len(tokens)))
    if fixed > 0 and slope > 0:
        found.take("prefill_fixed_s", fixed, len(tokens))
        found.take("prefill_marginal_s", slope, len(tokens))


def _fit_transfer(
    samples: Sequence[TransferSample], prior: PlatformProfile, found: _Values, settings: FitSettings
) -> None:
    tokens = _column("transfer", "tokens", [s.tokens for s in samples])
    sizes = _column("transfer", "bytes", [s.bytes for s in samples])
    duration = _column("transfer", "duration_s", [s.duration_s for s in samples])
    count = len(samples)
    if count < settings.least_samples:
        found.refuse(f"{count} hand-overs, needs {settings.least_samples}", "transfer_bytes_per_s", "handover_s")
        return
    real = (tokens > 0) & (sizes > 0)
    if real.any():
        found.take("kv_bytes_per_token", weighted_median(sizes[real] / tokens[real], tokens[real]), int(real.sum()))
    ones = np.ones(count)
    reason = _too_alike(sizes, "hand-over sizes", settings)
    if reason is None:
        fixed, slope, residual = robust_line(sizes, duration, ones)
        if slope > 0:
            found.take("transfer_bytes_per_s", 1.0 / slope, count)
            found.take("handover_s", max(0.0, fixed), count)
            found.residuals["transfer"] = residual
            return
        reason = "hand-overs do not last longer with more bytes: bandwidth does not limit them"
    found.refuse(reason, "transfer_bytes_per_s")
    rest = weighted_median(duration - sizes / prior.transfer_bytes_per_s, ones)
    found.take("handover_s", max(0.0, rest), count)


_TURN_FIELDS = (
    "new_prompt_tokens",
    "response_tokens",
    "context_tokens",
    "prefill_s",
    "decode_s",
    "queue_s",
    "environment_s",
)


def fit_workload(
    trajectories: Sequence[Sequence[TurnSample]],
    *,
    batch: int,
    prior: WorkloadProfile,
    settings: FitSettings = FitSettings(),
) -> WorkloadFit:
    """S, r, ΔL, θ, T_env, contexts and `active_by_turn` from the turns of finished trajectories, in order.

    S and T_env are those of the trajectory that took longest in its step, averaged over steps. S counts turns of mean
    length, its response tokens over r: what it generates decides how long its path is, in however many turns. The rest
    are means over all turns. Raises `ProfileError` for samples that are not finite or negative.
    """
    samples = [sample for turns in trajectories for sample in turns]
    count = len(samples)
    # Checked first, so that a broken meter is an error however few samples there are.
    columns = {name: _column("turn", name, [getattr(s, name) for s in samples]) for name in _TURN_FIELDS}
    if count < settings.least_turns:
        reason = f"{count} turns, needs {settings.least_turns}"
        fields = ("turns", "new_prompt_tokens", "response_tokens", "bubble_ratio", "environment_s")
        return WorkloadFit(profile=replace(prior, batch=batch), refused=dict.fromkeys(fields, reason))
    lengths = np.array([len(turns) for turns in trajectories if turns])
    slowest = _slowest(trajectories)
    # What follows a trajectory's last turn is no pause between turns.
    pauses = np.array([s.environment_s for s in samples if not s.last] or [0.0], dtype=np.float64)
    decode = float(columns["decode_s"].sum())
    outside = sum(float(columns[name].sum()) for name in ("prefill_s", "queue_s", "environment_s"))
    response = clipped_mean(columns["response_tokens"])
    values: dict[str, Any] = {
        "turns": max(1.0, _path_turns(slowest, response)),
        "new_prompt_tokens": clipped_mean(columns["new_prompt_tokens"]),
        "response_tokens": response,
        "environment_s": float(np.mean([sum(s.environment_s for s in turns) for turns in slowest])),
        "context_tokens": clipped_mean(columns["context_tokens"]),
        "max_context_tokens": float(columns["context_tokens"].max()),
        "mean_turns": float(lengths.mean()),
        "turn_environment_s": clipped_mean(pauses),
    }
    refused = {}
    if decode > 0:
        values["bubble_ratio"] = outside / decode
    else:
        refused["bubble_ratio"] = "no decode time was measured"
    if values["response_tokens"] <= 0:
        del values["response_tokens"]
        refused["response_tokens"] = "no turn generated a token"
    origin = {**prior.origin, **dict.fromkeys(values, f"telemetry, {count} turns of {len(slowest)} steps")}
    profile = replace(
        prior,
        batch=batch,
        **values,
        active_by_turn=tuple(float((lengths > turn).mean()) for turn in range(int(lengths.max()))),
        origin=origin,
    )
    return WorkloadFit(profile=profile, used=dict.fromkeys(values, count), refused=refused)


def _path_turns(slowest: Sequence[Sequence[TurnSample]], response: float) -> float:
    """S: the slowest trajectories in turns of `response` tokens; plain turns where nothing was generated."""
    if response <= 0:
        return float(np.mean([len(turns) for turns in slowest]))
    return float(np.mean([sum(s.response_tokens for s in turns) for turns in slowest]) / response)


def _slowest(trajectories: Sequence[Sequence[TurnSample]]) -> list[Sequence[TurnSample]]:
    """Of each step the trajectory whose turns took longest together."""
    slowest: dict[int, tuple[float, Sequence[TurnSample]]] = {}
    for turns in trajectories:
        took = sum(s.prefill_s + s.decode_s + s.queue_s + s.environment_s for s in turns)
        if turns and took > slowest.get(turns[0].step, (-1.0, turns))[0]:
            slowest[turns[0].step] = took, turns
    return [turns for _, turns in slowest.values()]


def fit_overhead(
    steps: Sequence[StepMeasurement],
    *,
    workload: WorkloadProfile,
    platform: PlatformProfile,
    extended: bool = True,
    settings: FitSettings = FitSettings(),
) -> PlatformFit:
    """T_over from colocated steps and the hand-over cost from disaggregated ones: what makespans leave over per turn.

    PEARL's list of refitted parameters omits T_over, though the choice of the mode hangs on it: eq. (1) has no (1+θ).
    A step counts for the mode that it mostly ran under. With T(π) predicted, the segments of a step add up to the
    progress Σ Δt/T(π); the value at which that is 1 explains the step. Both results are medians over steps, at least 0.

    What steps leave over is in part no matter of the mode (trajectories slower than S turns of mean length, say). A
    mode that no step shows is therefore assumed to leave over half of what the other one does, on top of what
    `platform` says of it: a mode does not look better only because it was not tried.
    Raises `ProfileError` for seconds that are not finite or negative.
    """
    _column("step", "seconds", [seconds for step in steps for _, seconds in step.segments])
    found = _Values()
    spread: list[float] = []
    for name, mode in _COST_OF_MODE.items():
        chosen = [step for step in steps if step.mode is mode and step.makespan_s > 0]
        if len(chosen) < settings.least_steps:
            found.refuse(f"{len(chosen)} steps in {mode}, needs {settings.least_steps}", name)
            continue
        # The printed model knows no hand-over cost, so there is nothing to fit it by.
        if mode is Mode.DISAGGREGATION and not extended:
            found.refuse("eqs. (2) and (3) have no term for it", name)
            continue
        values = np.array([_explaining(step, name, workload, platform, extended) for step in chosen])
        middle = float(np.median(values))
        found.take(name, middle, len(chosen))
        spread += [abs(float(v) - middle) * workload.turns / s.makespan_s for v, s in zip(values, chosen, strict=True)]
    origin = {**platform.origin, **{name: f"telemetry, {count} steps" for name, count in found.used.items()}}
    values_of = dict(found.values)
    if extended and len(found.values) == 1:
        _share(values_of, platform, origin)
    return PlatformFit(
        profile=replace(platform, **values_of, origin=origin) if values_of else platform,
        used=found.used,
        refused=found.refused,
        residuals={"step": float(np.median(spread))} if spread else {},
    )


_COST_OF_MODE: Final = {"overhead_per_turn_s": Mode.COLOCATION, "handover_s": Mode.DISAGGREGATION}
"""Field of a platform profile that explains what steps of a mode leave over."""

_COMMON: Final = 0.5
"""Part of it that is assumed to be no matter of the mode, until the other one was measured too."""


def _share(values: dict[str, float], platform: PlatformProfile, origin: dict[str, str]) -> None:
    """Give the mode that no step shows its part of what the steps of the other one leave over."""
    (known, value), *_ = values.items()
    (other,) = _COST_OF_MODE.keys() - {known}
    # A hand-over costs what transfers measured; only what steps take beyond that is left over.
    over = value - platform.handover_s if known == "handover_s" else value
    if over > 0:
        values[other] = getattr(platform, other) + _COMMON * over
        origin[other] = f"{origin.get(other, 'prior')}, and half of what steps in {_COST_OF_MODE[known]} leave over"


def _explaining(
    step: StepMeasurement, name: str, workload: WorkloadProfile, platform: PlatformProfile, extended: bool
) -> float:
    """The value of the field `name` at which the model predicts the step's duration, at least 0, seconds."""

    def progress(value: float) -> float:
        if name == "handover_s":
            changed = replace(platform, handover_s=value)
        else:
            changed = replace(platform, overhead_per_turn_s=value)
        model: MakespanModel = deciding_model(workload, changed) if extended else PrintedModel(workload, changed)
        return math.fsum(seconds / _predicted_s(model, configuration) for configuration, seconds in step.segments)

    low, high = 0.0, step.makespan_s / workload.turns
    if progress(low) <= 1:
        return low
    for _ in range(40):
        middle = 0.5 * (low + high)
        if progress(middle) > 1:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _predicted_s(model: MakespanModel, configuration: Configuration) -> float:
    if configuration.prefill:
        return model.total_s(configuration.prefill, configuration.decode)
    return model.colocated(configuration.colocated).total_s
