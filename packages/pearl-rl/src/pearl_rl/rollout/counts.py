"""What becomes of the samples of a run."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class BufferCounts:
    """What became of every dispatched sample. The fields always add up to `dispatched`."""

    dispatched: int = 0
    in_flight: int = 0
    buffered: int = 0
    """Complete and not used yet."""
    used: int = 0
    rejected: int = 0
    """Too old at use; dispatched again."""
    failed: int = 0
    """Failed by the infrastructure; dispatched again."""
    dropped: int = 0
    """Given up: with their group, because its task cannot be played, or because the group waited too long for them."""
    cancelled: int = 0
    """Given up because the run ended."""

    @property
    def lost(self) -> int:
        """Samples that nobody can account for. Anything but 0 is a bug."""
        kept = self.in_flight + self.buffered + self.used
        return self.dispatched - kept - self.rejected - self.failed - self.dropped - self.cancelled
