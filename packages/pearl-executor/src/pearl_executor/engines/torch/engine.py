"""Engine: continuous batching on one worker, one iteration at a time.

Synchronous and single-threaded: the host calls `step` in a loop, streams what comes out, and waits `paced_s` between
iterations. Prefill goes first: as long as a prompt is incomplete, iterations compute prompt chunks (of as many
requests as fit); otherwise one iteration decodes one token of every running request.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pearl_executor.engines.torch import admission
from pearl_executor.engines.torch.batch import PackedRow, decode_row, prefill_row
from pearl_executor.engines.torch.blob import KvBlob
from pearl_executor.engines.torch.contract import (
    EngineError,
    EngineLimits,
    NotIdleError,
    Phase,
    RequestRefusedError,
    StepOutput,
    WeightsRefusedError,
)
from pearl_executor.engines.torch.memory import held_bytes
from pearl_executor.engines.torch.metering import Meter
from pearl_executor.engines.torch.model import Model
from pearl_executor.engines.torch.pool import KvPool
from pearl_executor.engines.torch.sampling import sample
from pearl_executor.engines.torch.scheduler import Chunk, Scheduler
from pearl_executor.engines.torch.sequence import Sequence as Request
from pearl_executor.pacing import Pace
from pearl_executor.ports import Finish, GenerateRequest, GenerateResult, MemoryReport, TokenChunk
from pearl_state.roles import Role
from pearl_state.samples import EngineSamples

__all__ = ["Engine", "EngineLimits", "KvBlob", "Phase", "StepOutput"]


@dataclass(slots=True)
class _Iteration:
    """An iteration while it runs."""

    phase: Phase
    begun_s: float
    chunks: dict[str, TokenChunk] = field(default_factory=dict)
    finished: dict[str, GenerateResult] = field(default_factory=dict)
    exported: dict[str, KvBlob] = field(default_factory=dict)


class Engine:
    """One worker's engine. An error it raises as a refusal (`EngineError`, `TransferError`) leaves it as it was."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        role: Role,
        limits: EngineLimits,
        pace: Pace | None = None,
        device: str = "cpu",
        threads: int = 1,
        seed: int = 0,
        weight_version: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build the model of `model_dir` (`config.json`; weights in safetensors if any, else random from `seed`).

        `weight_version` names the weights found there; with None they are nobody's, and the engine takes no request
        until `load_weights`. `threads` is how many compute on a CPU. `clock` gives seconds.
        """
        admission.check_role(role)
        self._device = torch.device(device)
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        self._model = Model(Path(model_dir), self._device, seed)
        admission.check_limits(limits, self._model)
        self._role, self._limits, self._pace, self._seed, self._clock = role, limits, pace or Pace(), seed, clock
        self._pool = KvPool(
            self._model.layout, limits.kv_tokens, limits.max_running, limits.max_context_tokens, self._device
        )
        self._scheduler = Scheduler(self._pool, limits)
        self._meter = Meter()
        self._aborted: list[Request] = []
        self._last_phase = Phase.IDLE
        self._version = weight_version
        self._usable = weight_version is not None
        self._released = False

    @property
    def role(self) -> Role:
        """The phase this engine runs."""
        return self._role

    @property
    def weight_version(self) -> int | None:
        """Version of the weights last loaded; None before the first. After `resume` they must be loaded again."""
        return self._version

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return bool(self._aborted) or not self._scheduler.idle

    # Requests

    def add(self, request: GenerateRequest, *, kv: KvBlob | None = None) -> None:
        """Queue a request; with `kv`, continue it from another worker's hand-over instead of computing its prompt.

        Raises `RequestRefusedError` for a request that can never be served here, `TransferError` for a `kv` that does
        not belong to it or to this engine, `EngineError` while there are no weights to serve it with.
        """
        if not self._usable or self._version is None:
            raise EngineError(f"request {request.rid}: the engine has no weights to serve it with; load_weights first")
        admission.check_request(request, self._role, self._limits, self._model, handed_over=kv is not None)
        if any(request.rid == other.request.rid for other in (*self._scheduler.requests(), *self._aborted)):
            raise RequestRefusedError(f"request {request.rid} is in the engine already")
        entry = Request.of(request, self._seed, self._clock())
        if kv is not None:
            admission.check_blob(kv, request, self._pool.layout, self._version)
            whole = self._scheduler.completed(kv, request.affinity, self._version)
            reusable = kv.version == self._version and not kv.mixed
            entry.take_in(whole, self._scheduler.epoch if reusable else -1)
        self._scheduler.waiting.append(entry)

    def abort(self, rid: str | None) -> None:
        """End one request, or all with None: the next `step` reports them with `Finish.INTERRUPTED`.

        No effect for an unknown `rid`: it has just finished.
        """
        for entry in self._scheduler.requests():
            if rid is None or entry.request.rid == rid:
                self._scheduler.withdraw(entry)
                self._aborted.append(entry)

    def held_tokens(self, prompt: Sequence[int], affinity: str) -> int:
        """First tokens of `prompt` whose KV this engine keeps: a hand-over may leave them out (`KvBlob.tail`)."""
        return self._scheduler.prefix.match(affinity, prompt)

    # One iteration

    def step(self) -> StepOutput:
        """Run one iteration. Returns at once where there is nothing to compute."""
        begun_s = self._clock()
        iteration = _Iteration(Phase.IDLE, begun_s)
        for entry in self._aborted:
            iteration.finished[entry.request.rid] = entry.result(Finish.INTERRUPTED, begun_s)
        self._aborted.clear()
        for entry in self._scheduler.admit(begun_s):
            self._meter.cached_tokens += entry.cached_tokens
        if chunks := self._scheduler.chunks():
            return self._prefill(iteration, chunks)
        if self._scheduler.running:
            return self._decode(iteration)
        return self._output(iteration, begun_s)

    def _prefill(self, iteration: _Iteration, chunks: list[Chunk]) -> StepOutput:
        iteration.phase = Phase.PREFILL
        logits = self._run(prefill_row(self._pool, chunks))
        complete = self._scheduler.computed(chunks)
        ended = self._append(iteration, complete, logits)
        tokens = sum(chunk.end - chunk.begin for chunk in chunks)
        end_s, duration_s = self._end(iteration, self._pace.prefill_s(tokens))
        self._meter.count_prefill(tokens, len(chunks), duration_s)
        for entry in complete:
            entry.prefill_done(end_s)
        self._finish(iteration, ended, end_s)
        if self._role is Role.PREFILL:
            for entry in [e for e in complete if e not in ended]:
                iteration.exported[entry.request.rid] = self._scheduler.export(entry, self._serving_version())
                self._scheduler.withdraw(entry)
        return self._output(iteration, end_s)

    def _decode(self, iteration: _Iteration) -> StepOutput:
        iteration.phase = Phase.DECODE
        running = list(self._scheduler.grow())
        logits = self._run(decode_row(self._pool, running))
        for entry in running:
            entry.computed += 1
        ended = self._append(iteration, running, logits)
        end_s, duration_s = self._end(iteration, self._pace.decode_s(len(running)))
        self._meter.count_decode(len(running), duration_s)
        self._finish(iteration, ended, end_s)
        return self._output(iteration, end_s)

    def _run(self, row: PackedRow) -> Tensor:
        return self._model.logits(row.tokens, row.positions, row.wanted, row.batch)

    def _append(self, iteration: _Iteration, entries: Sequence[Request], logits: Tensor) -> dict[Request, Finish]:
        """Sample the next token of each sequence. Returns those that end with it."""
        version = self._serving_version()
        tokens, logprobs = sample(
            logits, [entry.request.sampling for entry in entries], [entry.next_uniform() for entry in entries]
        )
        ended: dict[Request, Finish] = {}
        for entry, token, logprob in zip(entries, tokens, logprobs, strict=True):
            iteration.chunks[entry.request.rid] = TokenChunk((token,), (logprob,), version)
            finish = entry.append(token, logprob, version)
            if finish is not None:
                ended[entry] = finish
        self._meter.generated_tokens += len(entries)
        return ended

    def _end(self, iteration: _Iteration, least_s: float) -> tuple[float, float]:
        """When the iteration is over on the emulated device, and how long it takes there without the phase switch."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        duration_s = max(self._clock() - iteration.begun_s, least_s)
        # Only a colocated engine ever has both phases.
        switches = self._last_phase not in (Phase.IDLE, iteration.phase)
        self._last_phase = iteration.phase
        return iteration.begun_s + duration_s + (self._pace.phase_switch_s if switches else 0.0), duration_s

    def _finish(self, iteration: _Iteration, ended: dict[Request, Finish], end_s: float) -> None:
        for entry, finish in ended.items():
            self._scheduler.withdraw(entry)
            iteration.finished[entry.request.rid] = entry.result(finish, end_s)

    def _output(self, iteration: _Iteration, end_s: float) -> StepOutput:
        now_s = self._clock()
        return StepOutput(
            phase=iteration.phase,
            chunks=iteration.chunks,
            finished=iteration.finished,
            exported=iteration.exported,
            compute_s=now_s - iteration.begun_s,
            paced_s=max(0.0, end_s - now_s),
        )

    def _serving_version(self) -> int:
        if self._version is None:
            raise AssertionError("an iteration without weights")
        return self._version

    # Weights, memory, role

    def load_weights(self, path: str | Path, version: int, checksum: str | None = None) -> int:
        """Load a snapshot (a safetensors file, or a folder with some) and return its version.

        Requests in flight go on with the new weights over the KV they have; KV of older weights is never reused for
        another request. Raises `WeightsRefusedError`, and keeps the old weights, for a version that goes back, a
        snapshot that does not fit, or a `checksum` (of `weights_checksum`) that differs.
        """
        self._check_memory("load_weights")
        if self._version is not None and version < self._version:
            raise WeightsRefusedError(f"weight version {version} is older than the loaded {self._version}")
        self._model.load(Path(path), checksum)
        self._version = version
        self._usable = True
        self._scheduler.new_epoch()
        return version

    def release(self) -> MemoryReport:
        """Free weights and KV, keep the process. Only idle, and not twice (`NotIdleError`, `EngineError`)."""
        self._check_memory("release")
        self._check_idle("release")
        before = self._held_bytes()
        self._scheduler.prefix.clear()
        self._pool.release()
        self._model.release()
        self._released, self._usable = True, False
        return MemoryReport(before, self._held_bytes())

    def resume(self) -> MemoryReport:
        """Take the memory again. The engine takes requests after `load_weights`. `EngineError` if not released."""
        if not self._released:
            raise EngineError("resume: the engine has its memory; release it first")
        before = self._held_bytes()
        self._model.resume()
        self._pool.allocate()
        self._released = False
        return MemoryReport(before, self._held_bytes())

    def set_role(self, role: Role) -> None:
        """Change the role of an idle engine; its prefix cache is emptied, its weights stay."""
        admission.check_role(role)
        self._check_idle("set_role")
        self._scheduler.prefix.clear()
        self._role = role
        self._last_phase = Phase.IDLE

    def _check_idle(self, operation: str) -> None:
        if self.has_work:
            count = len(self._scheduler.requests()) + len(self._aborted)
            raise NotIdleError(f"{operation}: {count} requests are in the engine; end and report them first")

    def _check_memory(self, operation: str) -> None:
        if self._released:
            raise EngineError(f"{operation}: the engine gave its memory back; resume it first")

    def _held_bytes(self) -> int:
        return held_bytes([*self._model.tensors(), *self._pool.tensors()], self._device)

    # Measurements

    def take_samples(self) -> EngineSamples:
        """What was measured since the last call. Durations are those on the emulated device, phase switches excluded.

        `transfer` is empty: whoever moves KV measures that.
        """
        scheduler = self._scheduler
        return self._meter.take(
            self._role,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.prefilling),
            used=self._pool.used,
            capacity=self._pool.capacity,
        )
