"""Everything an executor needs, made of fakes, and what must hold in it at any time."""

import asyncio
from collections.abc import Mapping

from pearl_executor.calls import Action
from pearl_executor.execution import ElasticExecutor
from pearl_executor.limits import Limits
from pearl_executor.ports import GenerateRequest, GenerateResult, WorkerError
from pearl_executor.testing.faults import FaultScript
from pearl_executor.testing.memory import GpuLedger
from pearl_executor.testing.training import FakeTraining, FakeWeights
from pearl_executor.testing.workers import FakeWorkers, next_token
from pearl_state.effects import Effect
from pearl_state.events import Event
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Role, Zone
from pearl_state.worker import GpuId, Worker, WorkerId


def row(
    slot: int,
    lifecycle: Lifecycle = Lifecycle.ACTIVE,
    role: Role = Role.COLOCATED,
    *,
    zone: Zone = Zone.DEDICATED,
    version: int | None = None,
    incarnation: int = 1,
) -> Worker:
    """A row of a worker on one GPU with the number of its slot."""
    return Worker(
        id=WorkerId(slot),
        gpus=frozenset({GpuId(slot)}),
        role=role,
        zone=zone,
        lifecycle=lifecycle,
        incarnation=incarnation,
        weight_version=version,
    )


class FakeCall:
    """A generation that a caller waits for, and what the caller saw of it."""

    def __init__(self, task: "asyncio.Task[GenerateResult]", request: GenerateRequest) -> None:
        self.task = task
        self.request = request
        self.seen: list[int] = []

    @property
    def expected(self) -> list[int]:
        """The whole answer that the call was to give."""
        tokens: list[int] = []
        last = self.request.prompt[-1]
        for i in range(self.request.max_new_tokens):
            last = next_token(last, len(self.request.prompt) + i)
            tokens.append(last)
        return tokens

    def kept(self) -> bool:
        """Whether the caller has what was generated: partial tokens in order, and no more than were handed out."""
        if not self.task.done() or self.seen != self.expected[: len(self.seen)]:
            return False
        error = self.task.exception()
        if error is not None:
            return isinstance(error, WorkerError)
        return list(self.task.result().tokens) == self.seen


class FakeWorld:
    """Workers, training and weights over one ledger and one fault script, and an `ElasticExecutor` on top.

    Build it inside the running loop. `posted` holds the events that the executor answered with.
    """

    def __init__(
        self,
        *,
        training_gpus: frozenset[int] = frozenset(),
        version: int = 1,
        limits: Limits | None = None,
        delays_s: Mapping[str, float] | None = None,
        decode_token_s: float = 0.02,
    ) -> None:
        self.script = FaultScript(delays_s)
        self.ledger = GpuLedger()
        self.workers = FakeWorkers(script=self.script, ledger=self.ledger, decode_token_s=decode_token_s)
        self.weights = FakeWeights(version)
        gpus = frozenset(GpuId(gpu) for gpu in training_gpus)
        self.training = FakeTraining(gpus, script=self.script, ledger=self.ledger) if gpus else None
        self.limits = Limits() if limits is None else limits
        self.actions: list[Action] = []
        self.executor = ElasticExecutor(
            self.workers, self.training, self.weights, self.limits, on_action=self.actions.append
        )
        self.posted: list[Event] = []
        self.calls: list[FakeCall] = []

    async def run(self, effect: Effect) -> list[Event]:
        """Run an effect to its end; returns what was posted for it."""
        posted: list[Event] = []

        def post(event: Event) -> None:
            posted.append(event)
            self.posted.append(event)

        await self.executor.run(effect, post)
        return posted

    def generate(self, worker: Worker, tokens: int, prompt: tuple[int, ...] = (1, 2, 3)) -> FakeCall:
        """Begin a generation on a colocated worker."""
        request = GenerateRequest(rid=f"r{len(self.calls):04d}", prompt=prompt, max_new_tokens=tokens)
        call: FakeCall
        task = asyncio.ensure_future(
            self.workers.generate(worker, request, lambda chunk: call.seen.extend(chunk.tokens))
        )
        call = FakeCall(task, request)
        self.calls.append(call)
        return call

    def broken(self) -> list[str]:
        """What must never happen and did: misuse of an engine, or two owners of a GPU."""
        return [*self.workers.violations, *self.ledger.violations]
