"""Stand-ins for tests of everything around rollout: a generation port with a made-up model, tables, a trainer.

The made-up model is deterministic and depends on the whole history through its last token, so that a call that was cut
anywhere and resumed anywhere must give the same tokens as one that was not.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pearl_executor.ports import Finish, GenerateRequest, GenerateResult, OnChunk, TokenChunk, WeightSnapshot
from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.rollout.in_flight import resolve
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role, Zone
from pearl_state.table import WorkerTable
from pearl_state.trajectory import Trajectory, WeightSpan, merge_spans
from pearl_state.worker import GpuId, Worker, WorkerId


def next_token(last: int, length: int) -> int:
    """What the made-up model says after a context of `length` tokens that ends with `last`."""
    return (last * 31 + length * 17) % 9_973 + 10


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the made-up model generates after `prompt`."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context[-1], len(context)))
    return context[len(prompt) :]


def logprob(token: int) -> float:
    """The made-up model's log-probability of a token it drew."""
    return -((token % 97) + 1) / 100


def serving_table(
    roles: Mapping[int, Role] | Sequence[Role], version: int = 0, zone: Zone = Zone.DEDICATED
) -> WorkerTable:
    """A table in which all these workers are active with weight `version`; slot i has GPU i."""
    named = dict(roles) if isinstance(roles, Mapping) else dict(enumerate(roles))
    table = WorkerTable().bind(
        *(Worker(id=WorkerId(i), gpus=frozenset({GpuId(i)}), role=role, zone=zone) for i, role in named.items())
    )
    return admit(table.publish(version), named)


def admit(table: WorkerTable, ids: Iterable[int]) -> WorkerTable:
    """Start vacant workers and admit them, all at once, with the target version."""
    slots = [WorkerId(i) for i in ids]
    table = table.move(slots, Lifecycle.STARTING).move(slots, Lifecycle.PENDING_WEIGHTS)
    for slot in slots:
        table = table.report(slot, table.target_version)
    return table.move(slots, Lifecycle.ACTIVE)


def withdraw(table: WorkerTable, ids: Iterable[int], to: Lifecycle = Lifecycle.DRAINING) -> WorkerTable:
    """Take workers out of routing."""
    return table.move([WorkerId(i) for i in ids], to)


class NumberedTasks:
    """A `TaskSource` without end, whose tasks differ by their number alone."""

    size = None

    def task(self, index: int) -> Task:
        """`task-3` with seed 3."""
        return Task(id=f"task-{index}", seed=index)


@dataclass(slots=True, eq=False)
class FakeRequest:
    """One request that a fake worker got."""

    workers: tuple[Worker, ...]
    request: GenerateRequest
    at_s: float
    tokens: list[int] = field(default_factory=list[int])
    versions: list[int] = field(default_factory=list[int])
    ended: bool = False
    cut: "asyncio.Future[None] | None" = None
    interrupted: bool = False
    error: Exception | None = None


class FakeGeneration:
    """A `GenerationPort` whose workers are as fast, as new and as unreliable as a test says.

    `before_token(record)` is called before each token; it may raise what a port may raise, or set `interrupted`.
    """

    def __init__(
        self,
        *,
        prefill_s: float = 0.05,
        token_s: float = 0.01,
        before_token: Callable[[FakeRequest], None] = lambda _record: None,
    ) -> None:
        self.prefill_s = prefill_s
        self.token_s = token_s
        self.before_token = before_token
        self.on_dispatch: Callable[[FakeRequest], None] = lambda _record: None
        self.versions: dict[WorkerId, int] = {}
        """Weight version that a worker draws with; 0 where not said."""
        self.requests: list[FakeRequest] = []
        self.aborted: list[tuple[WorkerId, str]] = []
        self.abort_error: Exception | None = None
        self.abort_s = 0.0
        self.cached_tokens = 0
        """Of each prompt, as far as it is that long."""
        self.stream = True
        """Whether tokens are handed on as they are drawn, or only with the result."""

    @property
    def running(self) -> list[FakeRequest]:
        """Requests that are not over."""
        return [record for record in self.requests if not record.ended]

    async def generate(self, worker: Worker, request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        """Run on one worker."""
        return await self._run((worker,), request, on_chunk)

    async def generate_pair(
        self, prefill: Worker, decode: Worker, request: GenerateRequest, on_chunk: OnChunk
    ) -> GenerateResult:
        """Run on a pair."""
        return await self._run((prefill, decode), request, on_chunk)

    async def abort(self, worker: Worker, rid: str) -> None:
        """Note the abort and interrupt the request."""
        self.aborted.append((worker.id, rid))
        await asyncio.sleep(self.abort_s)
        if self.abort_error is not None:
            raise self.abort_error
        for record in self.running:
            if record.request.rid == rid:
                self._cut(record, None)

    def interrupt(self, worker: int) -> int:
        """End all requests of a worker with their partial tokens. Returns how many."""
        return self._end(worker, None)

    def lose(self, worker: int, error: Exception) -> int:
        """End all requests of a worker with `error`. Returns how many."""
        return self._end(worker, error)

    def _end(self, worker: int, error: Exception | None) -> int:
        hit = [record for record in self.running if any(w.id == worker for w in record.workers)]
        for record in hit:
            self._cut(record, error)
        return len(hit)

    def _cut(self, record: FakeRequest, error: Exception | None) -> None:
        record.interrupted, record.error = error is None, error
        if record.cut is not None:
            resolve(record.cut)

    async def _run(self, workers: tuple[Worker, ...], request: GenerateRequest, on_chunk: OnChunk) -> GenerateResult:
        loop = asyncio.get_running_loop()
        record = FakeRequest(workers, request, loop.time())
        self.requests.append(record)
        self.on_dispatch(record)
        try:
            finish = await self._draw(record, on_chunk)
        finally:
            record.ended = True
        spans = merge_spans([WeightSpan(version, 1) for version in record.versions])
        return GenerateResult(
            finish=finish,
            tokens=tuple(record.tokens),
            logprobs=tuple(logprob(token) for token in record.tokens),
            spans=spans,
            queue_s=0.0,
            prefill_s=self.prefill_s,
            decode_s=self.token_s * len(record.tokens),
            cached_tokens=min(self.cached_tokens, len(record.request.prompt)),
        )

    async def _draw(self, record: FakeRequest, on_chunk: OnChunk) -> Finish:
        request, worker = record.request, record.workers[-1]
        last, length = request.prompt[-1], len(request.prompt)
        await self._pause(record, self.prefill_s)
        while len(record.tokens) < request.max_new_tokens:
            self.before_token(record)
            if record.error is not None:
                raise record.error
            if record.interrupted:
                return Finish.INTERRUPTED
            last = next_token(last, length)
            length += 1
            version = self.versions.get(worker.id, 0)
            record.tokens.append(last)
            record.versions.append(version)
            if self.stream:
                on_chunk(TokenChunk((last,), (logprob(last),), version))
            if last in request.sampling.stop_token_ids:
                return Finish.STOP
            await self._pause(record, self.token_s)
        return Finish.LENGTH

    async def _pause(self, record: FakeRequest, duration_s: float) -> None:
        """Let time pass, less where the request is cut."""
        if record.interrupted or record.error is not None:
            return
        loop = asyncio.get_running_loop()
        record.cut = loop.create_future()
        timer = loop.call_later(duration_s, resolve, record.cut)
        try:
            await record.cut
        finally:
            timer.cancel()
            record.cut = None


@dataclass(frozen=True, slots=True)
class FakeUpdate:
    """What `FakeTrainer` made."""

    version: int
    snapshot: WeightSnapshot
    metrics: Mapping[str, float]
    duration_s: float


class FakeTrainer:
    """A `Trainer` that takes its time, remembers its batches and counts versions on."""

    def __init__(self, version: int = 0, update_s: float = 1.0, stride: int = 1) -> None:
        self.version = version
        self.update_s = update_s
        self.stride = stride
        self.batches: list[tuple[Trajectory, ...]] = []
        self.used_at: list[int] = []
        """The version that each batch was trained on."""
        self.busy: list[tuple[float, float]] = []
        """When each update ran."""

    async def update(self, trajectories: Sequence[Trajectory]) -> FakeUpdate:
        """Take `update_s` and make the next version."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.used_at.append(self.version)
        await asyncio.sleep(self.update_s)
        self.batches.append(tuple(trajectories))
        self.version += self.stride
        self.busy.append((began_s, loop.time()))
        snapshot = WeightSnapshot(version=self.version, uri=f"memory:{self.version}")
        return FakeUpdate(self.version, snapshot, {"loss": 0.5}, self.update_s)
