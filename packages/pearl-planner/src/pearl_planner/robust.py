"""Lines and averages that a few wild samples do not move."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MOST_POINTS = 96
_ROUNDS = 25
_HUBER = 1.345


def weighted_median(values: Floats, weights: Floats) -> float:
    """The value at half of the weight; the mean of two where the half falls between them."""
    if len(values) == 1:
        return float(values[0])
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    half = 0.5 * float(total[-1])
    at = int(np.searchsorted(total, half))
    # As `np.isclose`, which takes longer than all the rest.
    if abs(float(total[at]) - half) <= 1e-8 + 1e-5 * half and at + 1 < len(values):
        return float(0.5 * (values[order[at]] + values[order[at + 1]]))
    return float(values[order[at]])


def grouped_medians(x: Floats, y: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """One point for each distinct x (or, of many, for each of about a hundred bins of them): x, median y, weight."""
    distinct, index = np.unique(x, return_inverse=True)
    binned = len(distinct) > _MOST_POINTS
    if binned:
        edges = quantiles(x, np.linspace(0.0, 1.0, _MOST_POINTS + 1).tolist())
        index = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, _MOST_POINTS - 1)
    order = np.argsort(index, kind="stable")
    bounds = np.flatnonzero(np.diff(index[order])) + 1
    points = [
        (
            weighted_median(x[part], weights[part]) if binned else x[part[0]],
            weighted_median(y[part], weights[part]),
            weights[part].sum(),
        )
        for part in np.split(order, bounds)
    ]
    columns = np.array(points, dtype=np.float64).T
    return columns[0], columns[1], columns[2]


def robust_line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float, float]:
    """Intercept and slope of y over x, and the relative spread of what they leave over.

    Theil–Sen over the medians of equal x, then Huber's reweighted least squares from there: up to about a quarter of
    the points may be anything. Needs at least two distinct x.
    """
    x, y, weights = grouped_medians(x, y, weights)
    i, j = np.triu_indices(len(x), k=1)
    slope = weighted_median((y[j] - y[i]) / (x[j] - x[i]), np.sqrt(weights[i] * weights[j]) * np.abs(x[j] - x[i]))
    intercept = weighted_median(y - slope * x, weights)
    for _ in range(_ROUNDS):
        left = y - intercept - slope * x
        spread = 1.4826 * weighted_median(np.abs(left), weights)
        if spread <= 1e-12 * float(np.abs(y).max()):
            break
        scaled = np.abs(left) / (_HUBER * spread)
        pull = weights / np.maximum(1.0, scaled)
        pull[scaled > 4.0 / _HUBER] = 0.0
        mean_x, mean_y = np.average(x, weights=pull), np.average(y, weights=pull)
        variance = float(np.sum(pull * (x - mean_x) ** 2))
        if variance <= 0:
            break
        new = float(np.sum(pull * (x - mean_x) * (y - mean_y)) / variance)
        settled = abs(new - slope) <= 1e-9 * abs(slope)
        slope, intercept = new, float(mean_y - new * mean_x)
        if settled:
            break
    left = np.abs(y - intercept - slope * x)
    level = weighted_median(np.abs(y), weights)
    return intercept, slope, weighted_median(left, weights) / level if level else 0.0


def robust_plane(columns: Floats, y: Floats, weights: Floats) -> tuple[Floats, float] | None:
    """Coefficients of y over `columns` (points × terms), and the relative spread of what they leave over.

    Huber's reweighted least squares; None where the points do not tell the terms apart.
    """
    if len(y) < 2 * columns.shape[1]:
        return None
    scale = np.abs(columns).max(axis=0)
    if not np.all(scale > 0):
        return None
    columns, pull = columns / scale, weights.copy()
    found: Floats = np.zeros(columns.shape[1])
    left: Floats = y
    for _ in range(_ROUNDS):
        root = np.sqrt(pull)
        new, _, rank, _ = np.linalg.lstsq(columns * root[:, None], y * root, rcond=1e-6)
        if rank < columns.shape[1]:
            return None
        settled = bool(np.all(np.abs(new - found) <= 1e-9 * np.abs(new)))
        found = np.asarray(new, dtype=np.float64)
        left = y - columns @ found
        spread = 1.4826 * weighted_median(np.abs(left), weights)
        if settled or spread <= 1e-12 * float(np.abs(y).max()):
            break
        pull = weights / np.maximum(1.0, np.abs(left) / (_HUBER * spread))
    level = weighted_median(np.abs(y), weights)
    return found / scale, weighted_median(np.abs(left), weights) / level if level else 0.0


def quantiles(values: Floats, parts: Iterable[float]) -> list[float]:
    """As `np.quantile` gives them, which imports masked arrays at its first call."""
    ordered = np.sort(values)
    return [_between(ordered, part * (len(ordered) - 1)) for part in parts]


def _between(ordered: Floats, place: float) -> float:
    """The value at a place between two of them, on a line from the nearer one."""
    at = int(place)
    left, right = float(ordered[at]), float(ordered[min(at + 1, len(ordered) - 1)])
    part = place - at
    return left + (right - left) * part if part < 0.5 else right - (right - left) * (1.0 - part)


def clipped_mean(values: Floats) -> float:
    """Mean, with what lies beyond ten interquartile ranges of the middle half pulled back to there."""
    low, high = quantiles(values, (0.25, 0.75))
    margin = 10.0 * max(high - low, 1e-9 * max(1.0, abs(high)))
    if high == low:
        return float(values.mean())
    return float(np.clip(values, low - margin, high + margin).mean())
