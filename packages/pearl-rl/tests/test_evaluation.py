"""Evaluation beside training: every token of one version, publication waits, failures are left out."""

import asyncio

import pytest

from pearl_executor.ports import WeightSnapshot
from pearl_executor.virtual_time import run_virtual
from pearl_rl.rollout.agent import Episode
from pearl_rl.rollout.calls import Generate, ModelCall
from pearl_rl.rollout.environments.protocol import EnvironmentFailure
from pearl_rl.rollout.evaluation import AnchoredEvaluation, EvaluationResult
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.testing import FakeGeneration, NumberedTasks, serving_table
from pearl_state.roles import Role
from pearl_state.trajectory import Trajectory, Turn
from pearl_state.worker import WorkerId


class OneCall:
    """One model call, then `environment_s` of work; task 2 fails."""

    def __init__(self, environment_s: float = 10.0) -> None:
        self._environment_s = environment_s

    async def run(self, episode: Episode, generate: Generate) -> Trajectory:
        result = await generate(ModelCall(trajectory=episode.trajectory, turn=0, prompt=(1, 2), max_new_tokens=3))
        await asyncio.sleep(self._environment_s)
        if episode.task.id == "task-2":
            raise EnvironmentFailure("broken")
        turn = Turn(prompt=(1, 2), response=result.tokens, logprobs=result.logprobs, spans=result.spans)
        return Trajectory(
            id=episode.trajectory, group=episode.group, task=episode.task.id, turns=(turn,),
            reward=float(episode.task.seed), dispatch_version=episode.dispatch_version, started_s=0.0, finished_s=0.0,
        )  # fmt: skip


def test_publication_waits_for_the_evaluation_and_workers_of_older_weights_do_not_serve_it() -> None:
    async def main() -> None:
        port = FakeGeneration()
        router = Router(port)
        router.apply(serving_table([Role.COLOCATED], version=0))
        results: list[EvaluationResult] = []
        evaluation = AnchoredEvaluation(
            router=router, agent=OneCall(), tasks=NumberedTasks(), episodes=4, every=2, seed=1, on_result=results.append
        )
        published: list[tuple[int, float]] = []

        def publish(snapshot: WeightSnapshot) -> None:
            published.append((snapshot.version, asyncio.get_running_loop().time()))

        anchored = evaluation.publishing(publish)
        await anchored(WeightSnapshot(1, "one"))
        await anchored(WeightSnapshot(2, "two"))
        await asyncio.sleep(30.0)
        # The only worker still holds version 0: nobody may play for version 2.
        assert results == []
        port.versions[WorkerId(0)] = 2
        router.apply(serving_table([Role.COLOCATED], version=2))
        await anchored(WeightSnapshot(3, "three"))
        assert [version for version, _ in published] == [1, 2, 3]
        assert published[2][1] >= 40.0
        assert (results[0].version, results[0].rewards, results[0].failed) == (2, (0.0, 1.0, 3.0), 1)
        assert results[0].reward_mean == pytest.approx(4 / 3)
        kept = results[0].event(50.0)
        assert (kept.version, kept.episodes, kept.failed, kept.reward_mean) == (2, 3, 1, results[0].reward_mean)
        assert (evaluation.due(2), evaluation.due(3)) == (True, False)
        await evaluation.aclose()
        await router.aclose()

    run_virtual(main())


def test_an_evaluation_that_takes_too_long_is_cut_off_and_counts_what_it_has() -> None:
    async def main() -> None:
        router = Router(FakeGeneration())
        router.apply(serving_table([Role.COLOCATED], version=5))
        results: list[EvaluationResult] = []
        evaluation = AnchoredEvaluation(
            router=router, agent=OneCall(1e6), tasks=NumberedTasks(), episodes=2, every=1, seed=1,
            on_result=results.append, limit_s=60.0,
        )  # fmt: skip
        evaluation.begin(5)
        await evaluation.settle()
        assert (results[0].rewards, results[0].failed, results[0].reward_mean) == ((), 2, 0.0)
        await router.aclose()

    run_virtual(main())
    with pytest.raises(ValueError, match="episodes = 0"):
        AnchoredEvaluation(
            router=Router(FakeGeneration()), agent=OneCall(), tasks=NumberedTasks(), episodes=0, every=1, seed=1,
            on_result=lambda _result: None,
        )  # fmt: skip
