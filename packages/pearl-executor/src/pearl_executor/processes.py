"""What executors know of each process: whether it holds device memory, and how much. Keyed by slot and incarnation."""

from dataclasses import dataclass
from enum import StrEnum

from pearl_state.lifecycle import Lifecycle
from pearl_state.worker import Worker, WorkerId


class Residency(StrEnum):
    """Where a process stands with its device memory."""

    RESIDENT = "resident"
    RELEASED = "released"
    IN_DOUBT = "in_doubt"
    """A release or resume was asked for and its outcome is not known: it may be neither repeated nor undone."""


@dataclass(slots=True)
class Process:
    """One process, as far as its answers tell."""

    residency: Residency
    held_bytes: int = 0
    """Device memory that its last resume took, measured; 0 before the first."""


class Processes:
    """The processes that executors started or found; what a port may not be asked twice is remembered here."""

    def __init__(self) -> None:
        self._known: dict[tuple[WorkerId, int], Process] = {}

    def of(self, worker: Worker) -> Process:
        """The process of this incarnation; one not seen before is taken to be as its row says."""
        key = (worker.id, worker.incarnation)
        process = self._known.get(key)
        if process is None:
            parked = worker.lifecycle in (Lifecycle.RELEASED, Lifecycle.RESUMING)
            residency = Residency.RELEASED if parked else Residency.RESIDENT
            process = self._known[key] = Process(residency)
        return process

    def knows(self, worker: Worker) -> bool:
        """Whether this incarnation was seen before."""
        return (worker.id, worker.incarnation) in self._known

    def forget(self, worker: Worker) -> None:
        """Drop a process that is gone, and all older ones of its slot."""
        for key in [k for k in self._known if k[0] == worker.id and k[1] <= worker.incarnation]:
            del self._known[key]
