"""Writes a simulation into a run folder, line for line as a training run writes itself."""

from collections.abc import Callable, Mapping

from pearl_planner.elastic import ElasticState
from pearl_rl.control.recorder import Recorder
from pearl_rl.encoding import encode
from pearl_rl.observer import SilentObserver, StepRecord
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.run_folder import RunFolder
from pearl_state.configuration import Configuration
from pearl_state.effects import Effect
from pearl_state.events import Event
from pearl_state.trajectory import Trajectory
from pearl_state.worker import WorkerId


class SimulationRecording(SilentObserver):
    """Observer of the pipeline, and `on_step` of the Elastic Scheduler, that keeps everything in `folder`."""

    def __init__(
        self,
        folder: RunFolder,
        makespan_s: Callable[[ElasticState, Configuration], float | None],
        now_s: Callable[[], float],
        loads: Callable[[], Mapping[WorkerId, float]],
        lifecycle: LifecycleTrace | None = None,
    ) -> None:
        self.folder = folder
        if lifecycle is not None:
            lifecycle.listeners.append(folder.record_phase)
        self._recorder = Recorder(folder, SilentObserver(), makespan_s, now_s, loads)

    def on_control(self, event: Event, state: ElasticState, effects: tuple[Effect, ...]) -> None:
        """Keep one step of the core."""
        self._recorder.on_step(event, state, effects)

    def on_step(self, record: StepRecord) -> None:
        """See `Observer`."""
        self.folder.record_step(record)

    def on_trajectory(self, trajectory: Trajectory, step: int) -> None:
        """Keep a trajectory. Its tokens are only numbers, so that their count stands for them."""
        line = {name: getattr(trajectory, name) for name in _KEPT}
        turns = [
            {
                "prompt": len(turn.prompt),
                "response": len(turn.response),
                **{name: encode(getattr(turn, name)) for name in _TURN_KEPT},
            }
            for turn in trajectory.turns
        ]
        self.folder.record_counted({"step": step, **line, "turns": turns})


_KEPT = ("id", "group", "task", "reward", "dispatch_version", "started_s", "finished_s")
_TURN_KEPT = (
    "spans",
    "environment_s",
    "prefill_s",
    "decode_s",
    "queue_s",
    "started_s",
    "finished_s",
    "interruptions",
    "retained_tokens",
)
