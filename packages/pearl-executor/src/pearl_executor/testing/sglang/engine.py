"""The stand-in's scheduler: requests, pauses, memory, weights and roles. What kills the real one kills it.

One iteration gives every running request one token. A death is a process that ends by SIGKILL, as the real tree does
when its scheduler dies.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pearl_executor.ports import WorkerError
from pearl_executor.testing.sglang.memory import Ballast
from pearl_executor.testing.sglang.model import PrefixCache, Weights, draw, extend, vocabulary

TAGS = ("kv_cache", "weights", "cuda_graph")


def die() -> NoReturn:
    """End this process as SGLang's ends when its scheduler raises."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)  # the signal is faster


Die = Callable[[], NoReturn]


class Refused(Exception):
    """A request or control call that SGLang answers with an error. `facts` go into its answer."""

    def __init__(self, message: str, status: int = 400, **facts: Any) -> None:
        super().__init__(message)
        self.status = status
        self.facts = facts


@dataclass(slots=True, eq=False)
class StandInRequest:
    """One request in the engine."""

    rid: str
    prompt: list[int]
    limit: int
    stop: frozenset[int]
    room: tuple[str, int, int] | None
    events: "asyncio.Queue[dict[str, Any] | None]" = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[str] = field(default_factory=list[str])
    state: int = 0
    cached: int = 0
    retractions: int = 0
    began_s: float = 0.0
    first_s: float = 0.0


@dataclass(slots=True, eq=False)
class StandInEngine:
    """A server's whole state. `settings` are its parsed arguments."""

    settings: Mapping[str, Any]
    pull: Callable[[StandInRequest], Coroutine[Any, Any, int]]
    """Decode: fetch a request's KV from its prefill server; returns the prompt tokens that server had cached."""
    die: Die = die
    """Ends the server at once."""
    mode: str = "null"
    weights: Weights = field(init=False)
    vocabulary: int = field(init=False)
    version: str = "default"
    running: list[StandInRequest] = field(default_factory=list[StandInRequest])
    waiting: list[StandInRequest] = field(default_factory=list[StandInRequest])
    transferring: list[StandInRequest] = field(default_factory=list[StandInRequest])
    rooms: dict[int, int] = field(default_factory=dict[int, int])
    """Prefill: rooms whose KV waits for its decode server → prompt tokens that were cached."""
    cache: PrefixCache = field(default_factory=PrefixCache)
    paused: str = ""
    released: set[str] = field(default_factory=set[str])
    updating: bool = False
    unhealthy: bool = False
    fail_next_switch: bool = False
    role_epoch: int = 0
    decode_graphs: bool = False
    prefill_tokens: int = 0
    prefill_us: int = 0
    moments: list[float] = field(default_factory=lambda: [0.0] * 6)
    groups: set[str] = field(default_factory=set[str])
    admitting: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while paused."""
    memory: Ballast = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _receiving: "set[asyncio.Task[None]]" = field(default_factory=set["asyncio.Task[None]"])
    """Hand-overs under way; kept so that they are not collected."""

    def __post_init__(self) -> None:
        self.mode = str(self.settings["disaggregation_mode"])
        self.weights = Weights.read(Path(self.settings["model_path"]))
        self.vocabulary = vocabulary(Path(self.settings["model_path"]))
        self.version = str(self.settings["weight_version"])
        # What starts as decode captures its graphs at start.
        self.decode_graphs = self.mode == "decode"
        self.admitting.set()
        self.memory = Ballast.of(Path(self.settings["model_path"]), int(self.settings["max_total_tokens"]))

    # ---- requests ---------------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[StandInRequest]:
        """Every request that holds anything here."""
        return [*self.running, *self.waiting, *self.transferring]

    @property
    def idle(self) -> bool:
        """Nothing anywhere, rooms that nobody fetched included."""
        return not self.live and not self.rooms

    def admit(self, request: StandInRequest) -> None:
        """Queue a request. Raises `Refused` for one that is in flight already."""
        if any(other.rid == request.rid for other in self.live):
            raise Refused(f"Duplicate request ID detected: {request.rid}")
        if self.released:
            self.die()
        if self.mode != "null" and request.room is None:
            message = f"Invalid request: Disaggregated request received without bootstrap room id. {request.rid=}"
            self._finish(request, {"type": "abort", "message": message, "status_code": 400})
            return
        request.began_s = asyncio.get_running_loop().time()
        self.waiting.append(request)
        self._wake.set()

    def leave(self, request: StandInRequest) -> None:
        """Its client hung up."""
        for queue in (self.running, self.waiting, self.transferring):
            if request in queue:
                queue.remove(request)

    def abort(self, rid: str | None) -> None:
        """End requests whose id begins with `rid`, or all. While the scheduler is paused nothing ends."""
        if self.paused in ("retract", "in_place"):
            return
        for request in self.live:
            if rid is None or request.rid.startswith(rid):
                queued = request not in self.running
                self.leave(request)
                self._finish(request, {"type": "abort", "message": "Aborted", "status_code": None}, repeat=queued)

    async def run(self) -> None:
        """Iterate for ever."""
        while True:
            if self.paused in ("retract", "in_place") or not (self.waiting or self.running):
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(float(self.settings["step_s"]))
            if self.paused in ("retract", "in_place"):
                continue
            if self.released:
                self.die()
            self._take_waiting()
            self._decode()

    def _take_waiting(self) -> None:
        for request in list(self.waiting):
            self.waiting.remove(request)
            if self.mode == "decode":
                self.transferring.append(request)
                task = asyncio.ensure_future(self._receive(request))
                self._receiving.add(task)
                task.add_done_callback(self._receiving.discard)
            else:
                self._prefill(request)
                self.running.append(request)

    def _prefill(self, request: StandInRequest) -> None:
        context = [*request.prompt, *request.tokens]
        request.cached = self.cache.held(context)
        request.state = extend(self.weights.seed, context)
        self.prefill_tokens += len(context) - request.cached
        self.prefill_us += 10 * (len(context) - request.cached)
        self.cache.keep(context)

    async def _receive(self, request: StandInRequest) -> None:
        try:
            await self.pull(request)
        except (Refused, OSError, TimeoutError) as error:
            if request in self.transferring:
                self.leave(request)
                self._finish(request, {"type": "abort", "message": f"KVTransferError {error}", "status_code": 500})
            return
        if request in self.transferring:
            self.transferring.remove(request)
            request.cached = self.cache.held(request.prompt)
            request.state = extend(self.weights.seed, [*request.prompt, *request.tokens])
            self.cache.keep(request.prompt)
            self.running.append(request)
            self._wake.set()

    def _decode(self) -> None:
        if self.running:
            count, took_us = len(self.running), 1e6 * float(self.settings["step_s"]) + 50.0 * len(self.running)
            for at, value in enumerate((1, count, took_us, count**2, count * took_us, count)):
                self.moments[at] += value
        for request in list(self.running):
            token, logprob = draw(request.state, self.vocabulary)
            request.state = extend(request.state, [token])
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            request.first_s = request.first_s or asyncio.get_running_loop().time()
            reason = None
            if self.mode == "prefill":
                assert request.room is not None
                self.rooms[request.room[2]] = request.cached
                reason = {"type": "length", "length": 1}
            elif token in request.stop:
                reason = {"type": "stop", "matched": token}
            elif len(request.tokens) >= request.limit:
                reason = {"type": "length", "length": request.limit}
            if reason is None:
                request.events.put_nowait(self._event(request, 1, None))
                continue
            self.running.remove(request)
            self.cache.keep([*request.prompt, *request.tokens])
            self._finish(request, reason, new=1)

    def _finish(self, request: StandInRequest, reason: dict[str, Any], *, new: int = 0, repeat: bool = False) -> None:
        # An abort from a queue repeats the last token that was sent.
        count = 1 if repeat and request.tokens else new
        request.events.put_nowait(self._event(request, count, reason))
        request.events.put_nowait(None)

    def _event(self, request: StandInRequest, new: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        tokens = request.tokens[len(request.tokens) - new :]
        logprobs = request.logprobs[len(request.logprobs) - new :]
        now_s = asyncio.get_running_loop().time()
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.tokens),
            "cached_tokens": request.cached,
            "weight_version": self.version,
            "num_retractions": request.retractions,
            "queue_time": 0.0,
            "output_token_logprobs": [[lp, t, None] for lp, t in zip(logprobs, tokens, strict=True)],
        }
        if reason is not None:
            meta["weight_versions"] = _spans(request.versions)
            meta["e2e_latency"] = now_s - request.began_s
            meta["first_token_latency"] = (request.first_s or now_s) - request.began_s
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    # ---- control ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Hold ingress; "abort" returns once every request ended."""
        if mode not in ("abort", "retract", "in_place"):
            raise Refused(f"unknown mode {mode}")
        self.admitting.clear()
        if mode == "abort":
            self.paused = "abort"
            while self.live:
                self.abort(None)
                await asyncio.sleep(0.01)
            return
        self.paused = mode
        if mode == "retract":
            for request in self.running:
                request.retractions += 1
            self.waiting = [*self.running, *self.waiting]
            self.running.clear()

    def carry_on(self) -> None:
        """Undo a pause."""
        self.paused = ""
        self.admitting.set()
        self._wake.set()

    def flush(self) -> None:
        """Empty the cache of an idle server. Raises `Refused`."""
        waiting_counts = self.paused not in ("retract", "in_place")
        if self.running or self.transferring or self.rooms or (waiting_counts and self.waiting):
            raise Refused(f"Flush cache failed: #queue-req: {len(self.waiting)}, #running-req: {len(self.running)}")
        self.cache.clear()

    def release(self, tags: list[str]) -> None:
        """Give memory back; kills a server that is not idle."""
        if not self.idle and not (self.paused == "retract" and not self.running):
            self.die()
        if self.settings["enable_memory_saver"]:
            self.released |= set(tags or TAGS)
            self.cache.clear()
            self.memory.drop(self.released)

    def resume(self, tags: list[str]) -> None:
        """Take memory again; kills a server where a tag is not released."""
        if not self.settings["enable_memory_saver"]:
            return
        for tag in tags or TAGS:
            if tag not in self.released:
                self.die()
            self.released.remove(tag)
            self.memory.commit(tag)

    def begin_update(self) -> None:
        """Open a weight-update session."""
        if self.updating:
            raise Refused("a weight update session is already open")
        self.updating = True

    def end_update(self) -> None:
        """Close it."""
        if not self.updating:
            raise Refused("no weight update session is open")
        self.updating = False

    def require_session(self, name: str) -> None:
        """Tensor and group updates belong inside a session."""
        if not self.updating:
            raise Refused(f"{name} must run between begin_weight_update() and end_weight_update()", success=False)

    def load(self, folder: Path, version: str | None, *, flush: bool) -> None:
        """Replace the weights from disk. The old ones stay where that fails.

        Where only the flush is refused, the new weights stay under the old version.
        """
        try:
            self.weights = Weights.read(folder)
        except WorkerError as error:
            raise Refused(f"Failed to load weights: {error}", success=False) from None
        if flush and not self.idle:
            raise Refused("Weights were updated, but the cache was not flushed because requests are still running")
        if flush:
            self.flush()
        if version is not None:
            self.version = version

    def switch(self, role: str, *, graph_gb: float | None, prepare_only: bool) -> dict[str, Any]:
        """Change the role in place. Raises `Refused` with `safe_to_restore`."""
        old = self.mode
        if old == "null" or role not in ("prefill", "decode"):
            message = "not running in PD mode" if old == "null" else f"invalid new_role {role!r}"
            raise Refused(message, success=False, old_role=old, safe_to_restore=True)
        if self.unhealthy:
            raise Refused("instance unhealthy, restart required", success=False, old_role=old, safe_to_restore=False)
        if role == old:
            return _switched("already in target role", old, role, safe=False)
        if not self.idle:
            message = "instance is not idle; drain all requests before switching"
            raise Refused(message, success=False, old_role=old, safe_to_restore=True)
        if role == "decode" and not self.decode_graphs and graph_gb is None:
            message = "decode_cuda_graph_memory_gb is required before capturing decode graphs"
            raise Refused(message, success=False, old_role=old, safe_to_restore=True)
        if prepare_only:
            return _switched("ok", old, role, safe=True)
        if self.fail_next_switch:
            self.unhealthy = True
            raise Refused("rebuild failed; restart required", success=False, old_role=old, safe_to_restore=False)
        self.mode = role
        self.role_epoch += 1
        self.decode_graphs = self.decode_graphs or role == "decode"
        self.cache.clear()
        return _switched("ok", old, role, safe=False)


def _switched(message: str, old: str, new: str, *, safe: bool) -> dict[str, Any]:
    return {"success": True, "message": message, "old_role": old, "new_role": new, "safe_to_restore": safe}


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    return spans
