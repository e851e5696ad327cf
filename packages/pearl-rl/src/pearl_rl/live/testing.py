"""A job that people can operate: the production core with no workers behind it, effects are answered at once."""

import asyncio
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from pearl_planner.elastic import ElasticSettings, ElasticState, initial_state
from pearl_planner.policies import pearl
from pearl_planner.step import step
from pearl_rl.control.control_server import ControlServer
from pearl_rl.control.recorder import Recorder
from pearl_rl.observer import SilentObserver, StepRecord
from pearl_rl.parts import prior_workload
from pearl_rl.rollout.serving import WorkerLoad
from pearl_rl.run_folder import RunFolder
from pearl_rl.settings import load_settings
from pearl_state.effects import (
    ApplyStage,
    CancelGroup,
    CleanWorkers,
    Effect,
    PrepareGroup,
    ReleaseTraining,
    ResumeTraining,
    SyncWeights,
)
from pearl_state.events import (
    Event,
    GpusOffered,
    GroupFailed,
    GroupPrepared,
    RolloutBegan,
    StageApplied,
    TrainingReleased,
    TrainingResumed,
    WeightsReported,
    WorkersCleaned,
)
from pearl_state.profile import PlatformProfile
from pearl_state.roles import Tenure
from pearl_state.worker import GpuId

_PLATFORM = PlatformProfile(
    decode_fixed_s=0.02,
    decode_per_sequence_s=0.001,
    prefill_per_token_s=0.0005,
    kv_bytes_per_token=1000,
    transfer_bytes_per_s=2e8,
    kv_capacity_bytes=3e7,
)


class OperableJob:
    """A job in a run folder, listening, with two training GPUs and four rollout GPUs (workers 4 to 7) that serve."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.create(load_settings(None, ["control.http=true"]), path)
        self.state: ElasticState = initial_state(
            settings=ElasticSettings(policy=pearl()),
            workload=prior_workload(load_settings().settings),
            platform=_PLATFORM,
            training_gpus=2,
        )
        self._now_s = 0.0
        self._recorder = Recorder(
            self.folder, SilentObserver(), lambda _state, _configuration: 5.0, lambda: self._now_s
        )
        self._server = ControlServer(path, post=self.post, state=lambda: self.state)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        self.post(GpusOffered(now_s=1.0, gpus=frozenset({GpuId(2), GpuId(3)}), tenure=Tenure.RESERVED))
        self.post(GpusOffered(now_s=1.0, gpus=frozenset({GpuId(4), GpuId(5)})))
        self.post(RolloutBegan(now_s=2.0, step=1, batch=64))
        self.folder.record_loads(
            {id_: WorkerLoad(running=3, waiting=1, tokens=500, cached_tokens=100) for id_ in self.state.table.active()},
            now_s=2.5,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.__aexit__(kind, error, traceback)
        self.folder.close()

    def record_step(self, record: StepRecord) -> None:
        """A step is complete."""
        self.folder.record_step(record)

    def post(self, event: Event) -> None:
        """Take an event, and all answers to what it brings about."""
        queue = deque([event])
        while queue:
            event = queue.popleft()
            self._now_s = max(self._now_s + 0.01, event.now_s)
            self.state, effects = step(self.state, event)
            self._recorder.on_step(event, self.state, effects)
            queue.extend(answer for effect in effects for answer in self._answers(effect))

    def _answers(self, effect: Effect) -> list[Event]:
        now_s = self._now_s
        match effect:
            case PrepareGroup():
                version = self.state.table.target_version
                reported = {worker.id: version for worker in effect.workers}
                return [GroupPrepared(now_s=now_s, plan_id=effect.plan_id, reported=reported)]
            case CancelGroup():
                return [GroupFailed(now_s=now_s, plan_id=effect.plan_id)]
            case ApplyStage():
                return [
                    StageApplied(
                        now_s=now_s,
                        plan_id=effect.plan_id,
                        stage=effect.stage,
                        reported={worker.id: effect.target_version for worker in effect.admit},
                        left=frozenset(worker.id for worker in effect.leave),
                    )
                ]
            case SyncWeights():
                return [
                    WeightsReported(
                        now_s=now_s, worker=worker.id, incarnation=worker.incarnation, version=effect.version
                    )
                    for worker in effect.workers
                ]
            case CleanWorkers():
                return [WorkersCleaned(now_s=now_s, workers={w.id: w.incarnation for w in effect.workers})]
            case ReleaseTraining():
                return [TrainingReleased(now_s=now_s, plan_id=effect.plan_id)]
            case ResumeTraining():
                return [TrainingResumed(now_s=now_s)]
        return []


async def serve_until(job: OperableJob, ending: asyncio.Event) -> None:
    """Keep a job open until `ending`."""
    async with job:
        await ending.wait()
