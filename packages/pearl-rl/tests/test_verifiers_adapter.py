"""A real verifiers taskset, played through its own chat harness. Runs where verifiers is installed."""

import asyncio
import sys
from pathlib import Path

import pytest

from pearl_rl.rollout.environments.protocol import EnvironmentSettingsError, StepResult
from pearl_rl.rollout.environments.suites import make_suite

pytest.importorskip("verifiers.v1")

TASKSET = """
import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class Add(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Additions(vf.Taskset[Add, vf.TasksetConfig]):
    def load(self):
        for number in range(5):
            yield Add(Sum(prompt=f"{number} + 1 =", answer=str(number + 1)), self.config.task)


__all__ = ["Additions"]
"""


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "pearl_additions.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pearl_additions", raising=False)
    return "pearl_additions"


@pytest.mark.slow
def test_episodes_are_played_and_rewarded_by_verifiers(taskset: str) -> None:
    suite = make_suite("verifiers", {"taskset": taskset, "limit": 3})
    tasks = suite.tasks(0)
    assert tasks.size == 3

    async def episode(index: int, right: bool) -> StepResult:
        environment = suite.environment()
        try:
            first = await environment.reset(tasks.task(index))
            number = int(first.text.split()[0])
            return await environment.step(str(number + 1) if right else "no")
        finally:
            await environment.close()

    async def main() -> list[StepResult]:
        await suite.start()
        try:
            left = suite.environment()
            await left.reset(tasks.task(2))
            await left.close()
            return list(await asyncio.gather(episode(0, True), episode(1, False)))
        finally:
            await suite.close()

    results = asyncio.run(main())
    assert [(result.reward, result.done) for result in results] == [(1.0, True), (0.0, True)]
    assert results[0].info["calls"] == 1


def test_what_verifiers_does_not_know_is_refused(taskset: str) -> None:
    with pytest.raises(EnvironmentSettingsError, match="no_such_taskset"):
        make_suite("verifiers", {"taskset": "no_such_taskset"})
    with pytest.raises(EnvironmentSettingsError, match=r"may run what the model writes; say where"):
        make_suite("verifiers", {"taskset": taskset, "harness": "bash"})
