"""Fewer points than a long run has steps, so that its page stays small and its bars can be told apart."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Any

_SUMMED = frozenset({"duration_s", "generated_tokens", "trained_tokens", "trajectories"})
_LAST = frozenset({"step", "steps", "now_s", "configuration", "weight_version"})
_GREATEST = frozenset({"staleness_max", "lost_trajectories"})


def buckets(length: int, most: int) -> list[slice]:
    """At most `most` neighbouring slices of a sequence, all of one size but the last."""
    size = max(1, ceil(length / max(1, most)))
    return [slice(start, min(length, start + size)) for start in range(0, length, size)]


def means(steps: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """Steps, or where there are more than `most` the means of neighbours; each stands at its last step."""
    return _thinned(steps, most, summed=frozenset())


def sums(steps: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """As `means`, with tokens and durations added up, so that rates are those of the whole stretch."""
    return _thinned(steps, most, summed=_SUMMED)


def _thinned(steps: Sequence[Mapping[str, Any]], most: int, *, summed: frozenset[str]) -> Sequence[Mapping[str, Any]]:
    if len(steps) <= most:
        return steps
    return [_merged(steps[part], summed) for part in buckets(len(steps), most)]


def _merged(group: Sequence[Mapping[str, Any]], summed: frozenset[str]) -> Mapping[str, Any]:
    merged: dict[str, Any] = {}
    for name, value in group[-1].items():
        found = [step[name] for step in group if isinstance(step[name], int | float)]
        if name in _LAST or isinstance(value, str | Mapping | bool) or not found:
            merged[name] = value
        elif name in _GREATEST:
            merged[name] = max(found)
        else:
            merged[name] = sum(found) if name in summed else fmean(found)
    return merged
