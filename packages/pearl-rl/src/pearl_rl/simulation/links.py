"""KV hand-over between workers: every worker sends and receives one transfer at a time at its NICs' bandwidth."""

from dataclasses import dataclass, field

from pearl_state.worker import WorkerId


@dataclass(slots=True, eq=False)
class KvLinks:
    """Transfers occupy the sender's outgoing and the receiver's incoming link together, in the order of their start."""

    bytes_per_s: float
    """Of one worker, one direction."""
    latency_s: float = 2e-3
    """Fixed cost of a hand-over: metadata, registration, and notice of its end, seconds."""
    _sending_until_s: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    _receiving_until_s: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])

    def send(self, source: WorkerId, target: WorkerId, amount_bytes: float, now_s: float) -> tuple[float, float]:
        """Begin a transfer as soon as both ends are free. Returns when it begins and when it is over."""
        begins_s = max(now_s, self._sending_until_s.get(source, 0.0), self._receiving_until_s.get(target, 0.0))
        free_s = begins_s + amount_bytes / self.bytes_per_s
        self._sending_until_s[source] = self._receiving_until_s[target] = free_s
        return begins_s, free_s + self.latency_s

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone; another process of its slot begins with free links."""
        self._sending_until_s.pop(worker, None)
        self._receiving_until_s.pop(worker, None)
