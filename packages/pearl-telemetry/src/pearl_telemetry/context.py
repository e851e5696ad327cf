"""Which ids the spans of a run get, so that other processes can name their parents before these are written.

Spans of a trajectory are written when it is over, while its requests carry their context from the first one on. So its
ids follow from the run and the trajectory alone: a control plane that resumes derives the same ones again.
"""

import random
import threading
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class SpanIds:
    """A span's place: its trace, 128 bits, and itself, 64 bits; neither is 0."""

    trace: int
    span: int

    @property
    def traceparent(self) -> str:
        """As W3C Trace Context text, sampled."""
        return f"00-{self.trace:032x}-{self.span:016x}-01"


class TraceKeys:
    """Ids of the spans of one run; `run` names it, and is the same after a resume."""

    def __init__(self, run: str) -> None:
        self._key = blake2b(run.encode(), digest_size=32).digest()

    def trajectory(self, trajectory: str) -> SpanIds:
        """The root span of a trajectory."""
        digest = blake2b(trajectory.encode(), key=self._key, digest_size=24).digest()
        return SpanIds(int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:], "big") or 1)

    def turn(self, trajectory: str, turn: int) -> SpanIds:
        """The span of one turn, 0 for the first."""
        digest = blake2b(f"{trajectory}/{turn}".encode(), key=self._key, digest_size=8).digest()
        return SpanIds(self.trajectory(trajectory).trace, int.from_bytes(digest, "big") or 1)

    @staticmethod
    def fresh() -> SpanIds:
        """A trace of its own."""
        return SpanIds(random.getrandbits(128) or 1, random.getrandbits(64) or 1)


class ChosenIds:
    """An SDK id generator: gives the next span of this thread the ids that were chosen for it, others random ones."""

    def __init__(self) -> None:
        self._next = threading.local()

    def choose(self, ids: SpanIds) -> None:
        """The span that this thread starts next has `ids`."""
        self._next.ids = ids

    def generate_trace_id(self) -> int:
        """See the SDK: asked only for a span without a parent, before `generate_span_id`."""
        ids: SpanIds | None = getattr(self._next, "ids", None)
        return random.getrandbits(128) or 1 if ids is None else ids.trace

    def generate_span_id(self) -> int:
        """See the SDK: asked once for every span."""
        ids: SpanIds | None = getattr(self._next, "ids", None)
        self._next.ids = None
        return random.getrandbits(64) or 1 if ids is None else ids.span

    def is_trace_id_random(self) -> bool:
        """A hash is as good."""
        return True
