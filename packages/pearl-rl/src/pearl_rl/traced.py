"""Sets the trace context of what agents and executors do; only runs whose telemetry goes somewhere have them."""

from collections.abc import Awaitable, Callable

from pearl_executor.tracing import TRACEPARENT
from pearl_rl.control.scheduler import Executor, Post
from pearl_rl.rollout.agent import Agent, Episode
from pearl_rl.rollout.calls import Generate, ModelCall, TurnResult
from pearl_state.effects import Effect
from pearl_state.trajectory import Trajectory
from pearl_telemetry.context import TraceKeys


class TracedAgent:
    """An `Agent` around another one: each turn's model call and environment answer carry the turn's context."""

    def __init__(self, agent: Agent, keys: TraceKeys) -> None:
        self._agent = agent
        self._keys = keys

    async def run(self, episode: Episode, generate: Generate) -> Trajectory:
        """See `Agent`."""

        def in_its_turn(call: ModelCall) -> Awaitable[TurnResult]:
            # No coroutine: the context must hold in the agent's own task, for what the environment is asked next.
            TRACEPARENT.set(self._keys.turn(call.trajectory, call.turn).traceparent)
            return generate(call)

        before = TRACEPARENT.set(self._keys.trajectory(episode.trajectory).traceparent)
        try:
            return await self._agent.run(episode, in_its_turn)
        finally:
            TRACEPARENT.reset(before)


class TracedExecutor:
    """An `Executor` around another one: what an effect brings about carries the context of its reconfiguration."""

    def __init__(self, executor: Executor, context: Callable[[Effect], str]) -> None:
        self._executor = executor
        self._context = context

    async def run(self, effect: Effect, post: Post) -> None:
        """See `Executor`."""
        before = TRACEPARENT.set(self._context(effect))
        try:
            await self._executor.run(effect, post)
        finally:
            TRACEPARENT.reset(before)
