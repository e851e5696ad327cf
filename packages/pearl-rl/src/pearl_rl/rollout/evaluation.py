"""Evaluation beside training rollouts, anchored to one weight version (TideRL sections 3.2 and 8).

After an update, evaluation tasks begin on the new weights while the next step's rollout goes on on the same workers.
The next weights are published only when all of them are over, so every token that counts is of one version; under task
batching they come before all others. An episode that the infrastructure fails is left out and counted.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import fmean

from pearl_executor.ports import WeightSnapshot
from pearl_rl.rollout.agent import Agent, Episode
from pearl_rl.rollout.batch_rollout import trajectory_seed
from pearl_rl.rollout.calls import GenerationFailedError
from pearl_rl.rollout.environments.protocol import EnvironmentFailure, TaskSource
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.task_gate import TaskGate
from pearl_state.events import EvaluationFinished
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """What one version's evaluation came to."""

    version: int
    rewards: tuple[float, ...]
    failed: int = 0
    """Episodes without a reward."""
    duration_s: float = 0.0

    @property
    def reward_mean(self) -> float:
        """Mean reward; 0 where no episode came back."""
        return fmean(self.rewards) if self.rewards else 0.0

    def event(self, now_s: float) -> EvaluationFinished:
        """What the run keeps on record of it."""
        return EvaluationFinished(
            now_s=now_s,
            version=self.version,
            episodes=len(self.rewards),
            failed=self.failed,
            reward_mean=self.reward_mean,
            duration_s=self.duration_s,
        )


class AnchoredEvaluation:
    """Begins an evaluation after each `every` versions, and holds publication back until it is over."""

    def __init__(
        self,
        *,
        router: Router,
        agent: Agent,
        tasks: TaskSource,
        episodes: int,
        every: int,
        seed: int,
        on_result: Callable[[EvaluationResult], None],
        gate: TaskGate | None = None,
        limit_s: float = 3600.0,
    ) -> None:
        """`episodes` of the first tasks of `tasks`, the same each time. An evaluation that takes longer than `limit_s`
        is cut off; what it has counts.
        """
        if episodes < 1 or every < 1:
            raise ValueError(f"evaluation: episodes = {episodes} and every = {every}: both must be at least 1")
        self._router = router
        self._agent = agent
        self._tasks = tasks
        self._episodes = episodes
        self._every = every
        self._seed = seed
        self._on_result = on_result
        self._gate = gate
        self._limit_s = limit_s
        self._running: asyncio.Task[None] | None = None

    def due(self, version: int) -> bool:
        """Whether `version` will be evaluated."""
        return version % self._every == 0

    def publishing(
        self, publish: Callable[[WeightSnapshot], Awaitable[None] | None]
    ) -> Callable[[WeightSnapshot], Awaitable[None]]:
        """`publish`, after the evaluation under way and before the next one."""

        async def anchored(snapshot: WeightSnapshot) -> None:
            await self.settle()
            publication = publish(snapshot)
            if publication is not None:
                await publication
            if self.due(snapshot.version):
                self.begin(snapshot.version)

        return anchored

    def begin(self, version: int) -> None:
        """Begin to evaluate `version`, which was just published; its episodes wait for workers that hold it."""
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._evaluate(version), name="evaluation")

    async def settle(self) -> None:
        """Return once no evaluation is under way. Raises what a bug in an agent raises."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def aclose(self) -> None:
        """Give up what is under way."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _evaluate(self, version: int) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        plays = [asyncio.ensure_future(self._play(version, number)) for number in range(self._episodes)]
        try:
            done, late = await asyncio.wait(plays, timeout=self._limit_s)
        finally:
            for play in plays:
                play.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
        played = [play.result() for play in plays if play in done]
        rewards = tuple(trajectory.reward for trajectory in played if trajectory is not None)
        self._on_result(
            EvaluationResult(
                version=version,
                rewards=rewards,
                failed=len(late) + len(done) - len(rewards),
                duration_s=loop.time() - began_s,
            )
        )

    async def _play(self, version: int, number: int) -> Trajectory | None:
        trajectory, group = TrajectoryId(f"e{version:06d}.{number:05d}"), GroupId(f"e{version:06d}.{number:05d}")
        episode = Episode(
            trajectory=trajectory,
            group=group,
            task=self._tasks.task(number),
            dispatch_version=version,
            seed=trajectory_seed(self._seed, number),
        )
        self._router.begin(trajectory, version)
        generate = self._router.generate
        if self._gate is not None:
            self._gate.begin(trajectory, group, evaluation=True)
            generate = self._gate.generate
        finished = False
        try:
            played = await self._agent.run(episode, generate)
            finished = True
        except (GenerationFailedError, EnvironmentFailure):
            return None
        finally:
            self._router.end(trajectory)
            if self._gate is not None:
                self._gate.end(trajectory, finished=finished)
        return played if all(span.version == version for span in played.spans) else None
