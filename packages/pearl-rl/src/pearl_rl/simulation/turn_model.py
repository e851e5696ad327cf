"""A statistical model of agentic trajectories: turns, new prompt tokens, generated tokens, and tool times.

Marginals are tables at normal scores (so heavy tails stay); dependence is a Gaussian copula: long trajectories have
shorter turns, a trajectory's turns resemble each other, a longer response brings a longer observation, a longer
observation took longer. `fit_turn_model` makes one from recorded trajectories; the bundled ones say what they rest on.
"""

import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from statistics import NormalDist, correlation, fmean
from typing import Any

_NORMAL = NormalDist()
_LOWEST, _STEP, _KNOTS = -3.75, 0.25, 31
_LARGEST = 1e9
Sizes = Sequence[tuple[int, int, float | None]]
"""Turns of a trajectory: new prompt tokens, generated tokens, tool time after it (None: not recorded)."""


@dataclass(frozen=True, slots=True)
class Marginal:
    """A distribution of positive numbers by its values at normal scores -3.75, -3.5, …, 3.75."""

    values: tuple[float, ...]
    _logs: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise `ValueError` for a table that is too short, falls, or holds what is not positive or too large."""
        if len(self.values) != _KNOTS:
            raise ValueError(f"has {len(self.values)} values; it needs {_KNOTS}")
        for value, before in zip(self.values, (0.0, *self.values), strict=False):
            if not 0 < value <= _LARGEST or value < before:
                raise ValueError(f"{value:g} follows {before:g}; values must lie in (0, {_LARGEST:g}] and never fall")
        object.__setattr__(self, "_logs", tuple(math.log(value) for value in self.values))

    def at(self, score: float) -> float:
        """The value at a normal score; the ends hold beyond the table."""
        place = (score - _LOWEST) / _STEP
        if place <= 0:
            return self.values[0]
        if place >= _KNOTS - 1:
            return self.values[-1]
        index = int(place)
        low = self._logs[index]
        return math.exp(low + (self._logs[index + 1] - low) * (place - index))

    @classmethod
    def of(cls, groups: Iterable[Sequence[float]], *, least: float = 1.0) -> "Marginal":
        """The distribution of values that come in groups, each group weighing the same; at least `least`."""
        weighted = sorted((max(least, value), 1.0 / len(group)) for group in groups for value in group)
        total = math.fsum(weight for _, weight in weighted)
        middles: list[float] = []
        passed = 0.0
        for _, weight in weighted:
            middles.append((passed + 0.5 * weight) / total)
            passed += weight
        values = []
        for knot in range(_KNOTS):
            share = _NORMAL.cdf(_LOWEST + _STEP * knot)
            high = min(len(weighted) - 1, bisect_left(middles, share))
            low = max(0, high - 1) if middles[high] > share else high
            span = middles[high] - middles[low]
            part = (share - middles[low]) / span if span > 0 else 0.0
            value = weighted[low][0] + (weighted[high][0] - weighted[low][0]) * min(1.0, max(0.0, part))
            values.append(round(value, 4))
        return cls(tuple(values))


_MARGINALS = ("turns", "first_prompt", "new_prompt", "response", "tool_s")
_SCALARS = (
    "task_share",
    "response_share",
    "prompt_share",
    "tool_share",
    "turns_response",
    "turns_prompt",
    "response_prompt",
    "prompt_tool",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnModel:
    """Distributions and dependence of a kind of agentic task."""

    name: str
    turns: Marginal
    first_prompt: Marginal
    new_prompt: Marginal
    response: Marginal
    tool_s: Marginal
    task_share: float = 0.0
    """Part of the variance of trajectory scores that the task explains (trajectories of a GRPO group share it)."""
    response_share: float = 0.0
    """Part of the variance of response scores that lies between trajectories."""
    prompt_share: float = 0.0
    tool_share: float = 0.0
    turns_response: float = 0.0
    """Correlation of a trajectory's turns with its responses."""
    turns_prompt: float = 0.0
    response_prompt: float = 0.0
    """Correlation, within a trajectory, of a response with the observation that follows it."""
    prompt_tool: float = 0.0
    """Correlation of an observation with the time that its tool took."""
    origin: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `ValueError` for a share outside [0, 1], or a correlation outside [-1, 1]."""
        for name in _SCALARS:
            least, value = (0.0 if name.endswith("_share") else -1.0), getattr(self, name)
            if not least <= value <= 1.0:
                raise ValueError(f"{name} = {value}: must be in [{least:g}, 1]")

    def trajectory(
        self, task: random.Random, own: random.Random, most: int | None = None
    ) -> tuple[int, int, list[tuple[int, int, float]]]:
        """First prompt tokens, turns, and (new prompt tokens before it, generated tokens, tool time after it) of each.

        `task` gives what all trajectories of a task share, `own` the rest. The first turn's new prompt is the first
        prompt and counts 0 in the list. Of more than `most` turns only the first `most` are listed, but as many numbers
        are drawn.
        """
        normal = _normals(own).__next__
        shared, apart = math.sqrt(self.task_share), math.sqrt(1.0 - self.task_share)
        first = max(1, round(self.first_prompt.at(task.gauss(0.0, 1.0))))
        length = shared * task.gauss(0.0, 1.0) + apart * normal()
        count = max(1, round(self.turns.at(length)))
        wordy = _mix(self.turns_response, length, normal())
        bulky = _mix(self.turns_prompt, length, normal())
        slow = shared * task.gauss(0.0, 1.0) + apart * normal()
        turns: list[tuple[int, int, float]] = []
        between = [math.sqrt(s) for s in (self.response_share, self.prompt_share, self.tool_share)]
        within = [math.sqrt(1.0 - s) for s in (self.response_share, self.prompt_share, self.tool_share)]
        usual = [share * score for share, score in zip(between, (wordy, bulky, slow), strict=True)]
        follow_prompt, follow_tool = self.response_prompt, self.prompt_tool
        apart_prompt, apart_tool = _rest(follow_prompt), _rest(follow_tool)
        listed = count if most is None else min(count, most)
        new = 0
        for _ in range(listed):
            e_response = normal()
            e_prompt = follow_prompt * e_response + apart_prompt * normal()
            e_tool = follow_tool * e_prompt + apart_tool * normal()
            response = max(1, round(self.response.at(usual[0] + within[0] * e_response)))
            tool_s = self.tool_s.at(usual[2] + within[2] * e_tool)
            turns.append((new, response, tool_s))
            new = max(1, round(self.new_prompt.at(usual[1] + within[1] * e_prompt)))
        for _ in range(3 * (count - listed)):
            normal()
        return first, count, turns


def _normals(numbers: random.Random) -> Iterator[float]:
    """What `numbers.gauss(0, 1)` gives again and again, in less time: a pair of normals from each pair of numbers."""
    uniform = numbers.random
    while True:
        angle = uniform() * math.tau
        radius = math.sqrt(-2.0 * math.log(1.0 - uniform()))
        yield math.cos(angle) * radius
        yield math.sin(angle) * radius


def _rest(correlation_: float) -> float:
    """The weight of what is independent, so that the variance stays 1."""
    return math.sqrt(1.0 - correlation_ * correlation_)


def _mix(correlation_: float, score: float, other: float) -> float:
    return correlation_ * score + _rest(correlation_) * other


# ---- fitting --------------------------------------------------------------------------------------------------------


def fit_turn_model(
    name: str,
    trajectories: Sequence[Sizes],
    *,
    tool_s: Sequence[float] = (),
    prompt_tool: float | None = None,
    tool_share: float | None = None,
    task_share: float = 0.0,
    origin: Mapping[str, str] | None = None,
) -> TurnModel:
    """The model of recorded trajectories of at least two turns (the first turn's new prompt is the whole first prompt).

    Tool times come from the trajectories where they have them, else from `tool_s`, with their dependence as given.
    """
    played = [t for t in trajectories if len(t) >= 2]
    if len(played) < 8:
        raise ValueError(f"{len(played)} trajectories of two turns or more: a turn model needs 8")
    responses = _scores([[r for _, r, _ in t] for t in played])
    prompts = _scores([[p for p, _, _ in t[1:]] for t in played])
    lengths = _scores([[float(len(t))] for t in played])
    tools = [[s for *_, s in t[:-1] if s is not None] for t in played]
    recorded = [s for t in tools for s in t]
    if len(recorded) >= 8:
        tool_s, found_share = recorded, _between(_scores([t for t in tools if t]))
    elif not len(tool_s):
        raise ValueError(f"{name}: the trajectories have no tool times, and none are given")
    else:
        found_share = 0.0
    shares = _between(responses), _between(prompts)
    return TurnModel(
        name=name,
        turns=Marginal.of([float(len(t))] for t in trajectories),
        first_prompt=Marginal.of([float(t[0][0])] for t in trajectories if t),
        new_prompt=Marginal.of([float(p) for p, _, _ in t[1:]] for t in played),
        response=Marginal.of([float(r) for _, r, _ in t] for t in played),
        tool_s=Marginal.of([tool_s], least=0.01),
        task_share=task_share,
        response_share=round(shares[0], 4),
        prompt_share=round(shares[1], 4),
        tool_share=round(found_share if tool_share is None else tool_share, 4),
        turns_response=round(_of_means(lengths, responses, shares[0]), 4),
        turns_prompt=round(_of_means(lengths, prompts, shares[1]), 4),
        response_prompt=round(_inside([r[:-1] for r in responses], prompts), 4),
        prompt_tool=round(_tools_follow(played, prompts) if prompt_tool is None else prompt_tool, 4),
        origin=dict(origin or {}),
    )


def _scores(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Normal scores of all values together, in the groups they came in; equal values share their ranks' middle."""
    values = sorted(value for group in groups for value in group)
    count = len(values)
    first: dict[float, int] = {}
    last: dict[float, int] = {}
    for index, value in enumerate(values):
        first.setdefault(value, index)
        last[value] = index
    score = {v: _NORMAL.inv_cdf((0.5 * (first[v] + last[v]) + 0.5) / count) for v in first}
    return [[score[value] for value in group] for group in groups]


def _between(groups: Sequence[Sequence[float]]) -> float:
    """Intraclass correlation: the part of the variance that lies between groups (one-way ANOVA)."""
    kept = [g for g in groups if len(g) > 1]
    total, count = sum(map(len, kept)), len(kept)
    if count < 2 or total <= count:
        return 0.0
    grand = math.fsum(math.fsum(g) for g in kept) / total
    among = math.fsum(len(g) * (fmean(g) - grand) ** 2 for g in kept) / (count - 1)
    inside = math.fsum((v - fmean(g)) ** 2 for g in kept for v in g) / (total - count)
    size = (total - math.fsum(len(g) ** 2 for g in kept) / total) / (count - 1)
    return min(0.99, max(0.0, (among - inside) / (among + (size - 1) * inside)))


def _of_means(lengths: Sequence[Sequence[float]], groups: Sequence[Sequence[float]], share: float) -> float:
    """Correlation of a trajectory's score with its latent mean: the means' noise is corrected for."""
    pairs = [(length[0], fmean(group)) for length, group in zip(lengths, groups, strict=True) if group]
    size = fmean(len(g) for g in groups if g)
    reliable = math.sqrt(share * size / (1.0 + (size - 1.0) * share)) if share > 0 else 1.0
    return max(-0.95, min(0.95, _correlation(*zip(*pairs, strict=True)) / reliable))


def _inside(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """Correlation within trajectories."""
    xs: list[float] = []
    ys: list[float] = []
    for a, b in zip(first, second, strict=True):
        if a:
            mean_a, mean_b = fmean(a), fmean(b)
            xs += [v - mean_a for v in a]
            ys += [v - mean_b for v in b]
    return _correlation(xs, ys)


def _tools_follow(played: Sequence[Sizes], prompts: Sequence[Sequence[float]]) -> float:
    scored = []
    for trajectory, group in zip(played, prompts, strict=True):
        scored += [(s, p) for (*_, s), p in zip(trajectory, group, strict=False) if s is not None]
    if len(scored) < 8:
        return 0.0
    tools = [s[0] for s in _scores([[t] for t, _ in scored])]
    return _correlation(tools, [p for _, p in scored])


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return 0.0
    return min(1.0, max(-1.0, correlation(xs, ys)))


# ---- bundled models -------------------------------------------------------------------------------------------------

BUNDLED = ("swe", "webshop", "weka")
"""Names of the bundled models."""


@cache
def bundled_turn_model(name: str) -> TurnModel:
    """A model of `BUNDLED`. Raises `KeyError`."""
    if name not in BUNDLED:
        raise KeyError(name)
    path = files("pearl_rl.simulation") / "data" / "workload" / f"{name}.json"
    return turn_model_from_json(json.loads(path.read_text(encoding="utf-8")))


def turn_model_from_json(document: Mapping[str, Any]) -> TurnModel:
    """The model that `turn_model_to_json` wrote. Raises `ValueError` for anything else."""
    values = dict(document) if isinstance(document, Mapping) else {}
    known = {item.name for item in fields(TurnModel)}
    missing = next((key for key in ("name", *_MARGINALS) if key not in values), None)
    if missing is not None or not values.keys() <= known:
        raise ValueError(f"has no {missing}" if missing else f"has an unknown {sorted(values.keys() - known)[0]}")
    try:
        for key in _MARGINALS:
            values[key] = Marginal(tuple(float(v) for v in values[key]))
        for key in _SCALARS:
            values[key] = float(values.get(key, 0.0))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from None
    return TurnModel(**values)


def turn_model_to_json(model: TurnModel) -> dict[str, Any]:
    """A JSON-able form."""
    document: dict[str, Any] = {"name": model.name, "origin": dict(model.origin)}
    document.update({key: list(getattr(model, key).values) for key in _MARGINALS})
    document.update({key: getattr(model, key) for key in _SCALARS})
    return document
