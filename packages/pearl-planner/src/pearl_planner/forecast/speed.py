"""θ^P: how fast one prefill instance serves, from its busy intervals (Prorsa section 4.2).

A busy interval begins when an idle instance gets a prompt and ends when no prompt of it is left: then the tokens that
were served and the time that it took are of the same requests. Idle time never counts, and what is cut off by a role
switch or a loss is no measurement. Tokens are full prompts, so that cache hits show in the time and nowhere else.
"""

from dataclasses import dataclass, field
from typing import Final

from pearl_planner.forecast.durations import magnitude
from pearl_state.worker import WorkerId

_KEPT_S: Final = 120.0
"""Busy seconds of one workload profile that are remembered: older ones fade as newer come."""


@dataclass(slots=True)
class _Interval:
    began_s: float
    in_hand: int = 0
    tokens: int = 0
    requests: int = 0
    cut: bool = False


@dataclass(slots=True)
class _Measured:
    tokens: float = 0.0
    busy_s: float = 0.0

    def add(self, tokens: float, busy_s: float) -> None:
        fade = _KEPT_S / (_KEPT_S + busy_s) if self.busy_s + busy_s > _KEPT_S else 1.0
        self.tokens = self.tokens * fade + tokens
        self.busy_s = self.busy_s * fade + busy_s


@dataclass(slots=True)
class BusySpeed:
    """Follows the prompts of each instance. A workload profile is the magnitude of an interval's mean prompt."""

    _open: dict[WorkerId, _Interval] = field(default_factory=dict[WorkerId, _Interval])
    _measured: dict[int, _Measured] = field(default_factory=dict[int, _Measured])

    def began(self, instance: WorkerId, at_s: float) -> None:
        """A prompt was given to `instance`."""
        interval = self._open.get(instance)
        if interval is None:
            interval = self._open[instance] = _Interval(at_s)
        interval.in_hand += 1

    def served(self, instance: WorkerId, tokens: int, at_s: float) -> None:
        """A prompt of `tokens` is computed."""
        interval = self._open.get(instance)
        if interval is None:
            return
        interval.tokens += tokens
        interval.requests += 1
        self._left(instance, interval, at_s)

    def cut(self, instance: WorkerId, at_s: float) -> None:
        """A prompt was taken away from `instance` before it was computed: its interval is no measurement."""
        interval = self._open.get(instance)
        if interval is not None:
            interval.cut = True
            self._left(instance, interval, at_s)

    def _left(self, instance: WorkerId, interval: _Interval, at_s: float) -> None:
        interval.in_hand -= 1
        if interval.in_hand > 0:
            return
        del self._open[instance]
        busy_s = at_s - interval.began_s
        if interval.cut or busy_s <= 0.0 or not interval.requests:
            return
        profile = magnitude(interval.tokens / interval.requests)
        self._measured.setdefault(profile, _Measured()).add(interval.tokens, busy_s)

    def tokens_per_s(self, prompt_tokens: float, profiled: float) -> float:
        """θ^P for prompts of about this length: Σ tokens / Σ busy seconds, else of the nearest length, else
        `profiled`. Never zero for lack of observations.
        """
        if not self._measured:
            return profiled
        wanted = magnitude(prompt_tokens)
        nearest = min(self._measured, key=lambda profile: (abs(profile - wanted), profile))
        measured = self._measured[nearest]
        return measured.tokens / measured.busy_s
