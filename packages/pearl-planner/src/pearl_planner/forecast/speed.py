"""θ^P: how fast one prefill instance serves, from its busy intervals (Prorsa section 4.2).

A busy interval begins when an idle instance gets a prompt and ends when no prompt of it is left: then the tokens that
were served and the time that it took are of the same requests. Idle time never counts, and what is cut off by a role
switch or a loss is no measurement. Tokens are full prompts, so that cache hits show in the time and nowhere else:
intervals are kept apart by the mean length of their prompts and by the part of them that is new to its trajectory.
"""

from dataclasses import dataclass, field
from typing import Final

from pearl_planner.forecast.durations import magnitude
from pearl_state.worker import WorkerId

_KEPT_S: Final = 120.0
"""Busy seconds of one workload profile that are remembered: older ones fade as newer come."""

_LEAST_FRESH: Final = 1.0 / 64.0
"""Smallest new part that is told apart."""


@dataclass(slots=True)
class _Interval:
    began_s: float
    in_hand: int = 0
    tokens: int = 0
    fresh: float = 0.0
    requests: int = 0
    cut: bool = False


@dataclass(slots=True)
class _Measured:
    tokens: float = 0.0
    fresh: float = 0.0
    busy_s: float = 0.0

    def add(self, tokens: float, fresh: float, busy_s: float) -> None:
        fade = _KEPT_S / (_KEPT_S + busy_s) if self.busy_s + busy_s > _KEPT_S else 1.0
        self.tokens = self.tokens * fade + tokens
        self.fresh = self.fresh * fade + fresh
        self.busy_s = self.busy_s * fade + busy_s


@dataclass(slots=True)
class BusySpeed:
    """Follows the prompts of each instance. A workload profile is (magnitude of the mean prompt, magnitude of prompt
    over new part).
    """

    _open: dict[WorkerId, _Interval] = field(default_factory=dict[WorkerId, _Interval])
    _measured: dict[tuple[int, int], _Measured] = field(default_factory=dict[tuple[int, int], _Measured])

    def began(self, instance: WorkerId, at_s: float) -> None:
        """A prompt was given to `instance`."""
        interval = self._open.get(instance)
        if interval is None:
            interval = self._open[instance] = _Interval(at_s)
        interval.in_hand += 1

    def served(self, instance: WorkerId, tokens: int, at_s: float, fresh: float = 1.0) -> None:
        """A prompt of `tokens` is computed; the part `fresh` of it is new to its trajectory."""
        interval = self._open.get(instance)
        if interval is None:
            return
        interval.tokens += tokens
        interval.fresh += fresh * tokens
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
        profile = _profile(interval.tokens / interval.requests, interval.fresh / max(1, interval.tokens))
        self._measured.setdefault(profile, _Measured()).add(interval.tokens, interval.fresh, busy_s)

    def tokens_per_s(self, prompt_tokens: float, profiled_fresh_per_s: float, fresh: float = 1.0) -> float:
        """θ^P for prompts of about this length and new part: Σ tokens / Σ busy seconds of their profile.

        Where none of it has completed, the nearest profile's is scaled by the new parts, and before any the profiled
        speed on new tokens is: never zero for lack of observations.
        """
        fresh = min(1.0, max(_LEAST_FRESH, fresh))
        if not self._measured:
            return profiled_fresh_per_s / fresh
        length, part = wanted = _profile(prompt_tokens, fresh)
        known = self._measured.get(wanted)
        if known is None:
            near = min(self._measured, key=lambda p: (abs(p[1] - part) + abs(p[0] - length), p))
            known = self._measured[near]
            if near[1] != part:
                return known.tokens / known.busy_s * (known.fresh / known.tokens) / fresh
        return known.tokens / known.busy_s


def _profile(prompt_tokens: float, fresh: float) -> tuple[int, int]:
    return magnitude(prompt_tokens), magnitude(1.0 / max(_LEAST_FRESH, fresh))
