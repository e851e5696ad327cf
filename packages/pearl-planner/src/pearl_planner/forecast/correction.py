"""The multiplicative bias correction of Prorsa B.8: what was measured over what was forecast, of the windows so far."""

from dataclasses import dataclass, replace
from typing import Final

_LEAST: Final = 1.0 / 3.0
_MOST: Final = 3.0


@dataclass(frozen=True, slots=True)
class BiasCorrection:
    """Both sums fade with the same weight, so that a window counts by its tokens and an empty one hardly at all."""

    weight: float = 0.2
    """Of the newest window."""
    measured: float = 0.0
    forecast: float = 0.0
    windows: int = 0

    @property
    def factor(self) -> float:
        """What a raw forecast is multiplied by; 1 before the first window."""
        if self.measured <= 0.0 or self.forecast <= 0.0:
            return 1.0
        return min(_MOST, max(_LEAST, self.measured / self.forecast))

    def observe(self, raw_tokens: float, measured_tokens: float) -> "BiasCorrection":
        """Take the residual of one window in: its raw forecast and what it then had.

        A forecast of nothing has no factor and teaches none. The first window counts beside one without bias, because
        what begins (no durations known, everybody in one phase) is not what goes on.
        """
        if raw_tokens <= 0.0:
            return self
        if not self.windows:
            even = max(raw_tokens, measured_tokens)
            measured, forecast = 0.5 * (even + measured_tokens), 0.5 * (even + raw_tokens)
        else:
            measured = (1.0 - self.weight) * self.measured + self.weight * measured_tokens
            forecast = (1.0 - self.weight) * self.forecast + self.weight * raw_tokens
        return replace(self, measured=measured, forecast=forecast, windows=self.windows + 1)


@dataclass(slots=True)
class ForecastError:
    """How far forecasts were off over a run: sums, which take the same memory however long it is."""

    windows: int = 0
    off: float = 0.0
    """Σ|forecast - measured|."""
    measured: float = 0.0
    """Σ measured."""

    def add(self, forecast: float, measured: float) -> None:
        """Take one window in: what was forecast at its begin, and what it then had (at least 0)."""
        self.windows += 1
        self.off += abs(forecast - measured)
        self.measured += measured

    @property
    def wape(self) -> float | None:
        """Weighted absolute percentage error, Σ|forecast - measured| / Σ measured (Prorsa section 5.5).

        None where nothing was measured.
        """
        return self.off / self.measured if self.measured > 0.0 else None
