"""θ^P: how fast one prefill instance serves, from its busy intervals (Prorsa section 4.2).

A busy interval begins when an idle instance gets a prompt and ends when no prompt of it is left: then the tokens that
were served and the time that it took are of the same requests. Idle time never counts, and what is cut off by a role
switch or a loss is no measurement. Under load that never ends no interval would: one that lasts is counted piece by
piece, each up to a prompt's end; what is in hand then counts in the next piece, as in steady work as much comes over
from the piece before. Tokens are full prompts, so that cache hits show in the time and nowhere else:
intervals are kept apart by the mean length of their prompts and by the part of them that is new to its trajectory.
"""

from dataclasses import dataclass, field, replace
from typing import Final

from pearl_planner.forecast.durations import magnitude
from pearl_state.worker import WorkerId

_KEPT_S: Final = 120.0
"""Busy seconds of one workload profile that are remembered: older ones fade as newer come."""

_PIECE_S: Final = 10.0
"""Length from which on an interval is counted though it goes on."""

_SERVICE_KEPT_S: Final = 2_000.0
"""Seconds in service that are remembered: of one instance with sixteen attention ranks, two minutes."""

_PRIOR_S: Final = 30.0
"""Seconds in service that what was known before counts for."""

_LEAST_SERVICE_S: Final = 1e-6
"""No prompt is computed in less: what is told to be is no measurement."""

LEAST_FRESH: Final = 1.0 / 64.0
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
class _Line:
    """busy seconds = α · requests + β · new tokens, least squares over intervals of all profiles, older ones faded."""

    kept_s: float = _KEPT_S
    """Seconds that are remembered."""
    rr: float = 0.0
    """Sum of requests² / second; likewise with new tokens (n) and busy seconds (s) below."""
    rn: float = 0.0
    nn: float = 0.0
    rs: float = 0.0
    ns: float = 0.0

    def add(self, requests: float, new: float, busy_s: float) -> None:
        """Take one interval in, which weighs as its time: its sums over its seconds."""
        fade, weight = self.kept_s / (self.kept_s + busy_s), 1.0 / busy_s
        self.rr = self.rr * fade + weight * requests * requests
        self.rn = self.rn * fade + weight * requests * new
        self.nn = self.nn * fade + weight * new * new
        self.rs = self.rs * fade + requests
        self.ns = self.ns * fade + new

    def coefficients(self) -> tuple[float, float]:
        """α and β; neither is less than nothing. Where all were alike, tokens count."""
        determinant = self.rr * self.nn - self.rn * self.rn
        if determinant > 1e-9 * self.rr * self.nn:
            a = (self.rs * self.nn - self.ns * self.rn) / determinant
            b = (self.ns * self.rr - self.rs * self.rn) / determinant
            if b < 0.0:
                return self.rs / self.rr, 0.0
            if a >= 0.0:
                return a, b
        return (0.0, self.ns / self.nn) if self.nn > 0.0 else (self.rs / self.rr, 0.0)

    def seconds(self, requests: float, new: float) -> float:
        """What so much work takes."""
        a, b = self.coefficients()
        return a * requests + b * new


@dataclass(slots=True)
class ServiceTimes:
    """g of eq. (13): how long one prompt is in service, against its tokens that must be computed.

    Workers tell it with their answers; a straight line through what the newest answers told, each of which weighs as
    its time.
    """

    answers: int = 0
    _line: _Line = field(default_factory=lambda: _Line(kept_s=_SERVICE_KEPT_S))

    def observe(self, new_tokens: float, seconds: float) -> None:
        """A prompt with so many tokens to compute was in service for `seconds`."""
        if seconds >= _LEAST_SERVICE_S:
            self._line.add(1.0, new_tokens, seconds)
            self.answers += 1

    def line(self, prior_token_s: float) -> tuple[float, float]:
        """(seconds of any prompt, seconds of each token). What was known before counts as an answer of `_PRIOR_S`, so
        that answers that are all alike do not say more than they know. `prior_token_s` must be above 0.
        """
        line = self._line
        nn, ns = line.nn + _PRIOR_S / prior_token_s**2, line.ns + _PRIOR_S / prior_token_s
        return replace(line, nn=nn, ns=ns).coefficients()


@dataclass(slots=True)
class BusySpeed:
    """Follows the prompts of each instance. A workload profile is (magnitude of the mean prompt, magnitude of prompt
    over new part).
    """

    _open: dict[WorkerId, _Interval] = field(default_factory=dict[WorkerId, _Interval])
    _measured: dict[tuple[int, int], _Measured] = field(default_factory=dict[tuple[int, int], _Measured])
    _line: _Line = field(default_factory=_Line)

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
        # Of a piece with little served the most would be what comes over.
        if 0 < interval.in_hand <= interval.requests and at_s - interval.began_s >= _PIECE_S:
            self._count(interval, at_s)
            self._open[instance] = _Interval(at_s, interval.in_hand)

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
        self._count(interval, at_s)

    def _count(self, interval: _Interval, at_s: float) -> None:
        busy_s = at_s - interval.began_s
        if interval.cut or busy_s <= 0.0 or not interval.requests:
            return
        profile = _profile(interval.tokens / interval.requests, interval.fresh / max(1, interval.tokens))
        self._line.add(interval.requests, interval.fresh, busy_s)
        self._measured.setdefault(profile, _Measured()).add(interval.tokens, interval.fresh, busy_s)

    def tokens_per_s(self, prompt_tokens: float, profiled_fresh_per_s: float, fresh: float = 1.0) -> float:
        """θ^P for prompts of about this length and new part: Σ tokens / Σ busy seconds of their profile.

        Where none of it has completed, it follows from what requests and new tokens took in all others, and before
        any from the profiled speed on new tokens: never zero for lack of observations.
        """
        fresh = min(1.0, max(LEAST_FRESH, fresh))
        if not self._measured:
            return profiled_fresh_per_s / fresh
        known = self._measured.get(_profile(prompt_tokens, fresh))
        if known is not None and known.tokens > 0.0:
            return known.tokens / known.busy_s
        prompt_tokens = max(1.0, prompt_tokens)
        return prompt_tokens / self._line.seconds(1.0, fresh * prompt_tokens)


def _profile(prompt_tokens: float, fresh: float) -> tuple[int, int]:
    return magnitude(prompt_tokens), magnitude(1.0 / max(LEAST_FRESH, fresh))
