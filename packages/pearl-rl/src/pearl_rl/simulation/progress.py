"""How far a simulation is."""

from collections.abc import Callable
from dataclasses import dataclass

from pearl_planner.elastic import ElasticState
from pearl_rl.simulation.scenario import Scenario
from pearl_state.effects import Effect
from pearl_state.events import Event, RolloutBegan, RolloutProgressed


@dataclass(slots=True)
class SimulationProgress:
    """Tells, at each event of the control plane, which part of a scenario is done: of its steps, else of its time."""

    scenario: Scenario
    tell: Callable[[float], None]
    """Gets a number from 0 to 1 that never falls."""
    _done: float = 0.0
    _batch: int = 1

    def __call__(self, event: Event, state: ElasticState, effects: tuple[Effect, ...]) -> None:
        """See `SimulatedCluster.on_control`."""
        del state, effects
        run = self.scenario.run
        if not run.steps:
            self._is(event.now_s / run.duration_s)
        elif isinstance(event, RolloutBegan):
            self._batch = max(1, event.batch)
        elif isinstance(event, RolloutProgressed):
            self._is((event.step - event.remaining / self._batch) / run.steps)

    def _is(self, done: float) -> None:
        self._done = max(self._done, min(1.0, done))
        self.tell(self._done)
