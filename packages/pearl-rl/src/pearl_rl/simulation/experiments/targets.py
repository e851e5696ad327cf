"""Rows of a reproduction: what the paper says, what we get, and whether that is close enough."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Use = Literal["calibrate", "predict"]
Unit = Literal["value", "ratio", "points", "within", "text"]

CALIBRATED_WITHIN = 0.05
RATIO_WITHIN = 0.15
POINTS_WITHIN = 10.0
CALIBRATED_POINTS_WITHIN = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One number, or one ordering, of a paper beside ours."""

    id: str
    """Figure or table: F2a, T2, …"""
    name: str
    use: Use
    """`calibrate`: parameters may be set by it; `predict`: must come out without."""
    paper: float | str
    ours: float | str
    unit: Unit = "value"
    """`points`: a gain in percent, compared in percentage points, its sign too; `within`: without the sign, for what is
    about 0; `ratio` and `value`: compared relatively; `text`: compared as it is."""
    at_least: bool = False
    """Whether `paper` is a bound that ours must exceed."""
    at_most: bool = False
    """Whether `paper` is a bound that ours must not exceed."""
    noise: float | None = None
    """Where `paper` is the closed lower end of a range, the standard error of ours over seeds: ours may be at that end,
    or below it by no more than this. None: ours must exceed a bound from below."""

    @property
    def error(self) -> float | None:
        """Relative error, or the difference in percentage points; None for texts."""
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return None
        return self.ours - self.paper if self.unit in ("points", "within") else self.ours / self.paper - 1.0

    @property
    def ok(self) -> bool:
        """Within the tolerance of its kind; a predicted gain must also have the paper's sign."""
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return self.paper == self.ours
        if self.at_least:
            return self.ours > self.paper if self.noise is None else self.ours >= self.paper - self.noise
        if self.at_most:
            return self.ours <= self.paper
        error = self.error
        assert error is not None
        if self.unit == "within":
            return abs(error) <= POINTS_WITHIN
        if self.unit == "points":
            within = CALIBRATED_POINTS_WITHIN if self.use == "calibrate" else POINTS_WITHIN
            return abs(error) <= within and (self.use == "calibrate" or self.ours * self.paper > 0)
        return abs(error) <= (CALIBRATED_WITHIN if self.use == "calibrate" else RATIO_WITHIN)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {
            "id": self.id,
            "name": self.name,
            "use": self.use,
            "paper": self.paper,
            "ours": self.ours,
            "unit": self.unit,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "noise": self.noise,
            "error": self.error,
            "ok": self.ok,
        }


def gain(value: float, base: float) -> float:
    """By how many percent `value` exceeds `base`."""
    return 100.0 * (value / base - 1.0)


def signs(gains: Iterable[float]) -> str:
    """Which of the gains are gains, and which losses: `+ + -`."""
    return " ".join("+" if value > 0 else "-" for value in gains)


def summary(rows: Sequence[TargetRow]) -> str:
    """How many rows of each use are met."""
    parts = []
    for use in ("calibrate", "predict"):
        chosen = [row for row in rows if row.use == use]
        parts.append(f"{use}: {sum(row.ok for row in chosen)} of {len(chosen)} met")
    return ", ".join(parts)
