"""Progress as plain lines, for logs and pipes."""

from collections.abc import Callable

from pearl_rl.observer import StepRecord
from pearl_rl.presentation.words import decision_line, seconds
from pearl_state.decision import Decision
from pearl_state.events import (
    Event,
    GpusOffered,
    GpusReclaimed,
    GroupFailed,
    StageApplied,
    TrainingReleased,
    TrainingResumed,
    WorkerFailed,
)
from pearl_state.table import WorkerTable


class PlainView:
    """An observer that writes one line a step, and one for each change worth it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def on_table(self, table: WorkerTable) -> None:
        """Nothing: the step's line names the configuration."""

    def on_decision(self, decision: Decision, trigger: str) -> None:
        """A line where the configuration changes."""
        if decision.selected != decision.previous:
            self._write(f"decision  {decision_line(decision, trigger)}")

    def on_step(self, record: StepRecord) -> None:
        """One line."""
        borrowed = " borrowed" if record.borrowed else ""
        self._write(
            f"step {record.step:>{len(str(record.steps))}}/{record.steps}  reward {record.reward_mean:.3f}  "
            f"{record.configuration or '-'}{borrowed}  rollout {seconds(record.rollout_s)}  "
            f"training {seconds(record.training_s)}  {record.trajectories} trajectories  "
            f"age {record.staleness_mean:.1f}  at {seconds(record.now_s)}"
        )

    def on_event(self, event: Event) -> None:
        """A line for GPUs that come and go, and for failures."""
        match event:
            case GpusOffered():
                self._write(f"offered   {_gpus(len(event.gpus), event.tenure)} at {seconds(event.now_s)}")
            case GpusReclaimed():
                notice_s = max(0.0, event.deadline_s - event.now_s)
                self._write(
                    f"reclaimed {_gpus(len(event.gpus))}, {seconds(notice_s)} notice, at {seconds(event.now_s)}"
                )
            case WorkerFailed():
                self._write(f"failed    worker {event.worker}: {event.cause}")
            case GroupFailed() | StageApplied():
                for worker, cause in sorted(event.failed.items()):
                    self._write(f"failed    {cause if str(worker) in cause else f'worker {worker}: {cause}'}")
            case TrainingReleased() | TrainingResumed() if event.failed is not None:
                self._write(f"failed    {event.failed}")
            case _:
                pass

    def on_message(self, text: str) -> None:
        """The line itself."""
        self._write(text)


def _gpus(count: int, kind: str = "") -> str:
    return " ".join(word for word in (str(count), kind, "GPU" if count == 1 else "GPUs") if word)
