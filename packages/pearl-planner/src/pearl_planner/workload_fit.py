"""Fits the workload profile to the turns of finished trajectories (PEARL section 4.3.2); says what it could not fit.

The Runtime Tracker of a run averages over steps instead; this is for who has all turns at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from pearl_planner.fit import FitSettings, column
from pearl_planner.robust import Floats, clipped_mean
from pearl_state.profile import WorkloadProfile
from pearl_state.samples import TurnSample


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFit:
    """A fitted workload profile."""

    profile: WorkloadProfile
    used: Mapping[str, int] = field(default_factory=dict[str, int])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])


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
    settings: FitSettings = FitSettings(),  # noqa: B008 - immutable
) -> WorkloadFit:
    """S, r, ΔL, θ, T_env, contexts and `active_by_turn` from the turns of finished trajectories, in order.

    S and T_env are those of the trajectory that took longest in its step, averaged over steps. S counts turns of mean
    length, its response tokens over r: what it generates decides how long its path is, in however many turns. The rest
    are means over all turns. Raises `ProfileError` for samples that are not finite or negative.
    """
    samples = [sample for turns in trajectories for sample in turns]
    count = len(samples)
    # Checked first, so that a broken meter is an error however few samples there are.
    columns = {name: column("turn", name, [getattr(s, name) for s in samples]) for name in _TURN_FIELDS}
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
        "decoded_context_tokens": _decoded_context(columns["context_tokens"], columns["response_tokens"]),
        "slowest_turns": float(np.mean([len(turns) for turns in slowest])),
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
        context_by_turn=_contexts(trajectories),
        origin=origin,
    )
    return WorkloadFit(profile=profile, used=dict.fromkeys(values, count), refused=refused)


def _decoded_context(contexts: Floats, responses: Floats) -> float:
    """Mean context at which a token is generated, tokens; 0 where none is."""
    return float(np.average(contexts + 0.5 * responses, weights=responses)) if responses.any() else 0.0


def _contexts(trajectories: Sequence[Sequence[TurnSample]]) -> tuple[float, ...]:
    """Mean context at turn 1, 2, … of those who reach it, tokens."""
    columns = zip_longest(*([float(s.context_tokens) for s in turns] for turns in trajectories))
    present = ([tokens for tokens in column if tokens is not None] for column in columns)
    return tuple(math.fsum(tokens) / len(tokens) for tokens in present)


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
