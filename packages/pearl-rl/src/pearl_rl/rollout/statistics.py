"""What the router counts, and how long how many trajectories were decoding."""

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class PrefixUse:
    """Where prefixes were when their trajectories came again, and what caches held of them, tokens."""

    kept: int = 0
    """Context of all requests at the request before: what caches hold at best."""
    moved: int = 0
    """Part of it that was left behind, since another worker had less to do or the old one does not serve any more."""
    found: int = 0
    """Part of `kept` that need not be computed again."""
    moved_found: int = 0
    """Part of `found` that was elsewhere all the same: an older visit's, or what others share."""

    def count(self, *, tokens: int, there: bool, found: int) -> None:
        """A trajectory that had `tokens` tokens came again, to the same worker or not, which had `found` of them."""
        found = min(found, tokens)
        self.kept += tokens
        self.found += found
        if not there:
            self.moved += tokens
            self.moved_found += found

    def lost(self) -> float:
        """Tokens that who moved would have found where they were: as much of a prefix as those found who stayed.

        A prompt that rewrites what came before repeats little of it wherever it goes, so that a move costs as little.
        """
        stayed = self.kept - self.moved
        reuse = (self.found - self.moved_found) / stayed if stayed else 1.0
        return max(0.0, self.moved * reuse - self.moved_found)

    def since(self, earlier: "PrefixUse") -> float | None:
        """`lost()` as part of `kept`, of what was counted after `earlier`; None where nothing was."""
        new = PrefixUse(
            self.kept - earlier.kept,
            self.moved - earlier.moved,
            self.found - earlier.found,
            self.moved_found - earlier.moved_found,
        )
        return new.lost() / new.kept if new.kept else None

    def copy(self) -> "PrefixUse":
        """The counts as they are now."""
        return replace(self)


@dataclass(slots=True, kw_only=True)
class RouterStatistics:
    """Counters since the run began. They only grow."""

    calls: int = 0
    """Model calls that were answered."""
    dispatched: int = 0
    """Attempts: requests given to workers."""
    resumed: int = 0
    """Attempts that went on from tokens of an earlier one."""
    interrupted: int = 0
    """Attempts that came back unfinished because their worker left or changed."""
    lost: int = 0
    """Attempts whose worker was lost."""
    transfer_retries: int = 0
    """Attempts that a failed KV hand-over ended."""
    failed_attempts: int = 0
    """Attempts that ended with any other error."""
    stalled: int = 0
    """Attempts given up because no token came for too long."""
    stale_served: int = 0
    """Attempts that produced a token below the weight-version floor. Anything but 0 is a bug."""
    version_regressions: int = 0
    """Attempts cut where their weight version would have gone back."""
    late_tokens: int = 0
    """Tokens that arrived for an attempt after its end, and were dropped."""
    duplicate_tokens: int = 0
    """Tokens that were delivered again, and were dropped."""
    discarded_tokens: int = 0
    """Tokens thrown away because partial responses are not kept."""
    affinity_kept: int = 0
    """Attempts dispatched to the worker that holds their prefix."""
    affinity_moved: int = 0
    """Attempts that left the worker that holds their prefix."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that prefix caches held."""
    prefixes: PrefixUse = field(default_factory=PrefixUse)
    generated_tokens: int = 0
    waits: int = 0
    """Calls that found nobody to serve them at first."""
    wait_s: float = 0.0
    """How long they waited, all together."""
    given_up: int = 0
    """Calls that ended with `GenerationFailedError`."""
    abort_failures: int = 0
    """Aborts that a worker did not carry out: it may still decode for nobody."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Time-weighted numbers of trajectories, integrals over time since the run began. Subtract two for an interval."""

    elapsed_s: float
    in_flight_s: float
    """Trajectories in flight × seconds."""
    generating_s: float
    """Trajectories with a request at a worker × seconds."""
    decoding_s: float
    """Trajectories that receive tokens × seconds."""

    def __sub__(self, earlier: "Concurrency") -> "Concurrency":
        """The integrals of the interval from `earlier` to this one."""
        return Concurrency(
            self.elapsed_s - earlier.elapsed_s,
            self.in_flight_s - earlier.in_flight_s,
            self.generating_s - earlier.generating_s,
            self.decoding_s - earlier.decoding_s,
        )

    @property
    def decoding_fraction(self) -> float | None:
        """f of PEARL section 4.3.1: mean fraction of trajectories that decode; None where none was in flight."""
        return self.decoding_s / self.in_flight_s if self.in_flight_s > 0 else None

    @property
    def bubble_ratio(self) -> float | None:
        """θ = (1 − f)/f; None where nothing was decoded."""
        fraction = self.decoding_fraction
        return None if fraction is None or fraction <= 0 else max(0.0, 1 / fraction - 1)


class ConcurrencyMeter:
    """Integrates three counts over time. Each change costs a few additions."""

    __slots__ = (
        "_at_s",
        "_decoding_s",
        "_generating_s",
        "_in_flight_s",
        "_start_s",
        "decoding",
        "generating",
        "in_flight",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        self.generating = 0
        self.decoding = 0
        self._start_s: float | None = None
        self._at_s = 0.0
        self._in_flight_s = 0.0
        self._generating_s = 0.0
        self._decoding_s = 0.0

    def advance(self, now_s: float) -> None:
        """Integrate up to `now_s`; call it before a count changes."""
        if self._start_s is None:
            self._start_s = self._at_s = now_s
        passed = now_s - self._at_s
        if passed > 0:
            self._in_flight_s += passed * self.in_flight
            self._generating_s += passed * self.generating
            self._decoding_s += passed * self.decoding
            self._at_s = now_s

    def credit_decoding(self, duration_s: float) -> None:
        """Add decode time of a request that delivered all its tokens at its end."""
        self._decoding_s += duration_s

    def read(self, now_s: float) -> Concurrency:
        """The integrals so far."""
        self.advance(now_s)
        assert self._start_s is not None
        return Concurrency(now_s - self._start_s, self._in_flight_s, self._generating_s, self._decoding_s)
