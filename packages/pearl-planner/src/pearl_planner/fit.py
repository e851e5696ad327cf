"""Fits the planner's parameters to telemetry samples (PEARL section 4.3.2), and says what it could not fit.

Too few samples, or samples too alike, do not carry a line: such a field keeps its prior value, and `refused` names the
reason. A sample that is not a number is an error, since it means a broken meter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from pearl_planner.makespan import MakespanModel, PrintedModel
from pearl_planner.robust import Floats, robust_line, robust_plane, weighted_median
from pearl_planner.steady import deciding_model
from pearl_state.configuration import Configuration
from pearl_state.errors import ProfileError
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode
from pearl_state.samples import DecodeSample, PrefillSample, TransferSample


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
    least_judged: int = 4
    """Steps that say how far predictions are off."""


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
class StepMeasurement:
    """One measured step: the configurations that it ran under, each with the seconds for which it was in force."""

    segments: tuple[tuple[Configuration, float], ...]
    turns: float = 0.0
    """S of this very step, in turns of mean length; 0 where unknown. Who is slowest is luck, of which the next steps'
    average says nothing."""
    slowest_turns: float = 0.0
    """Turns that its slowest trajectory really took."""
    environment_s: float = 0.0
    """T_env of this very step, seconds."""

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


def column(kind: str, name: str, values: Sequence[float], *, least: float = 0.0) -> Floats:
    """`values` as an array; raises `ProfileError` for the first that is not finite or below `least`."""
    numbers = np.array(values, dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= least)))
    if len(bad):
        at = int(bad[0])
        raise ProfileError(f"{kind} sample {at}: {name} = {values[at]}: must be a finite number of at least {least:g}")
    return numbers


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
    sequences = column("decode", "sequences", [s.sequences for s in samples], least=1)
    iterations = column("decode", "iterations", [s.iterations for s in samples], least=1)
    duration = column("decode", "duration_s", [s.duration_s for s in samples])
    count = int(iterations.sum())
    if count < settings.least_samples:
        found.refuse(f"{count} decode iterations, needs {settings.least_samples}", *names)
        return
    reason = _too_alike(sequences, "batch sizes", settings)
    if reason:
        found.refuse(reason, *names)
        return
    each = duration / iterations
    contexts = column("decode", "context_tokens", [s.context_tokens for s in samples])
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
    # b is that of these samples: what a prior knew of contexts was said of another one.
    found.take("decode_per_context_token_s", 0.0, count)
    found.take("decode_context_tokens", 0.0, count)
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
    mean = float(np.average(contexts, weights=sequences * iterations))
    found.take("decode_fixed_s", float(fixed), count)
    found.take("decode_per_sequence_s", float(slope + reading * mean), count)
    found.take("decode_per_context_token_s", float(reading), count)
    found.take("decode_context_tokens", mean, count)
    found.residuals["decode"] = residual
    return True


def _fit_prefill(samples: Sequence[PrefillSample], found: _Values, settings: FitSettings) -> None:
    tokens = column("prefill", "tokens", [s.tokens for s in samples])
    duration = column("prefill", "duration_s", [s.duration_s for s in samples])
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
    tokens = column("transfer", "tokens", [s.tokens for s in samples])
    sizes = column("transfer", "bytes", [s.bytes for s in samples])
    duration = column("transfer", "duration_s", [s.duration_s for s in samples])
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
    column("step", "seconds", [seconds for step in steps for _, seconds in step.segments])
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
        progress = [_progress(step, name, workload, platform, extended) for step in chosen]
        values = np.array([_explaining(step, made) for step, made in zip(chosen, progress, strict=True)])
        middle = float(np.median(values))
        found.take(name, middle, len(chosen))
        made = np.array([of(middle) for of in progress])
        spread += np.abs(made / np.median(made) - 1.0).tolist()
    origin = {**platform.origin, **{name: f"telemetry, {count} steps" for name, count in found.used.items()}}
    values_of = dict(found.values)
    if extended and len(found.values) == 1:
        (mode,) = (_COST_OF_MODE[name] for name in found.values)
        workers = max(c.workers for step in steps if step.mode is mode for c, _ in step.segments)
        _share(values_of, workload, platform, workers, origin)
    if extended and len(spread) >= settings.least_judged:
        # Standard error of a median over so many.
        values_of["step_error"] = 1.25 * 1.4826 * float(np.median(spread)) / math.sqrt(len(spread))
        origin["step_error"] = f"telemetry, {len(spread)} steps"
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


def _share(
    values: dict[str, float], workload: WorkloadProfile, platform: PlatformProfile, workers: int, origin: dict[str, str]
) -> None:
    """Give the mode that no step shows its part of the seconds that `workers` workers leave over in the other one."""
    (known, value), *_ = values.items()
    (other,) = _COST_OF_MODE.keys() - {known}
    # A hand-over costs what transfers measured; only what steps take beyond that is left over.
    if known == "handover_s":
        over_s = workload.turns * (value - platform.handover_s)
    else:
        one = Configuration(colocated=workers)
        fitted = replace(platform, overhead_per_turn_s=value)
        over_s = _predicted_s(deciding_model(workload, fitted), one) - _predicted_s(
            deciding_model(workload, replace(platform, overhead_per_turn_s=0.0)), one
        )
    if over_s <= 0:
        return
    if other == "handover_s":
        values[other] = platform.handover_s + _COMMON * over_s / workload.turns
    else:
        values[other] = _stall_s(_COMMON * over_s, workload, platform, workers)
    origin[other] = f"{origin.get(other, 'prior')}, and half of what steps in {_COST_OF_MODE[known]} leave over"


def _stall_s(more_s: float, workload: WorkloadProfile, platform: PlatformProfile, workers: int) -> float:
    """T_over with which a step of so many colocated workers takes `more_s` seconds longer than `platform` says."""

    def predicted_s(value: float) -> float:
        changed = replace(platform, overhead_per_turn_s=value)
        return _predicted_s(deciding_model(workload, changed), Configuration(colocated=workers))

    before = platform.overhead_per_turn_s
    wanted_s = predicted_s(before) + more_s
    # The slowest trajectory may ask for prefill in few of its turns, and stall in those only.
    return _bisect(before, before + more_s, lambda value: predicted_s(value) < wanted_s)


def _bisect(low: float, high: float, below: Callable[[float], bool]) -> float:
    """Where `below`, which is true from `low` on, ceases to be so; `high` at most."""
    for _ in range(40):
        middle = 0.5 * (low + high)
        if below(middle):
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _progress(
    step: StepMeasurement, name: str, workload: WorkloadProfile, platform: PlatformProfile, extended: bool
) -> Callable[[float], float]:
    """How far the step's seconds go by the model, by the value of the field `name`: 1 where it predicts them."""
    if step.turns:
        workload = replace(
            workload, turns=step.turns, slowest_turns=step.slowest_turns, environment_s=step.environment_s
        )

    def progress(value: float) -> float:
        if name == "handover_s":
            changed = replace(platform, handover_s=value)
        else:
            changed = replace(platform, overhead_per_turn_s=value)
        model: MakespanModel = deciding_model(workload, changed) if extended else PrintedModel(workload, changed)
        return math.fsum(seconds / _predicted_s(model, configuration) for configuration, seconds in step.segments)

    return progress


def _explaining(step: StepMeasurement, progress: Callable[[float], float]) -> float:
    """The value at which the model predicts the step's duration, at least 0, seconds."""
    if progress(0.0) <= 1:
        return 0.0
    return _bisect(0.0, step.makespan_s, lambda value: progress(value) > 1)


def _predicted_s(model: MakespanModel, configuration: Configuration) -> float:
    if configuration.prefill:
        return model.total_s(configuration.prefill, configuration.decode)
    return model.colocated(configuration.colocated).total_s
