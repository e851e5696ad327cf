"""The stand-in's routes: SGLang's HTTP API over the engine, its bootstrap server, and its gate."""

import asyncio
import hashlib
import json
import pickle
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pearl_executor.engines.sglang.options import VERSION
from pearl_executor.testing.sglang.engine import Die, Refused, StandInEngine, StandInRequest, die
from pearl_executor.testing.sglang.http import (
    Faults,
    HttpServer,
    Request,
    Response,
    error_response,
    json_response,
)
from pearl_executor.testing.sglang.model import Weights

_PARAMETERS = frozenset(
    {
        *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "sampling_seed"),
        *("stop", "stop_token_ids", "skip_special_tokens", "no_stop_trim", "ignore_eos", "stream_interval"),
    }
)
_OPEN = ("/health", "/ready", "/metrics", "/generate", "/ping", "/model_info", "/v1/loads", "/standin")
_ROUTE_S = 5.0
_SHARED_S = 10.0

Route = Callable[[Request], Awaitable[Response]]


class StandInServer:
    """One server process."""

    def __init__(self, settings: Mapping[str, Any], die: Die = die) -> None:
        self._settings = settings
        self._faults = Faults()
        self._die = die
        self.engine = StandInEngine(settings, self._pull, die)
        self._http = HttpServer(self._handle, self._faults, die)
        self._bootstrap = HttpServer(self._handle_bootstrap, self._faults, die)
        self._routes_known: dict[tuple[str, int], int] = {}
        """Decode: prefill address → its role epoch when it was first spoken to."""
        self._stale_routes = False
        self._contexts: dict[str, str] = {}
        """Request → the `traceparent` that it came with; only of those that brought one."""
        self._posts: dict[str, Route] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_ipc": self._from_ipc,
            "/update_weights_from_distributed": self._from_group,
            "/init_weights_update_group": self._join_group,
            "/destroy_weights_update_group": self._leave_group,
            "/update_weight_version": self._set_version,
            "/weights_checker": self._checksum,
            "/pd_role_switch": self._switch,
            "/standin/faults": self._set_faults,
        }
        self._gets: dict[str, Callable[[], Response]] = {
            "/ping": Response,
            "/health": Response,
            "/ready": lambda: Response(503 if self.engine.paused else 200),
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/metrics/": self._metrics,
            "/standin/contexts": lambda: json_response(self._contexts),
        }

    async def serve(self) -> None:
        """Until the process ends."""
        host = str(self._settings["host"])
        if self._settings["gated_launch_port"]:
            await self._hold(host, int(self._settings["gated_launch_port"]))
        if self.engine.mode != "null":
            await self._bootstrap.open(host, int(self._settings["disaggregation_bootstrap_port"]))
        await self._http.open(host, int(self._settings["port"]))
        await self.engine.run()

    def abort(self) -> None:
        """Be gone for whoever is connected."""
        self._http.abort()
        self._bootstrap.abort()

    def hang(self) -> None:
        """Answer nobody any more, and let nothing go on."""
        self._faults.hang = {*self._posts, *self._gets}
        self.engine.paused = "in_place"

    async def _hold(self, host: str, port: int) -> None:
        """Wait at the gate."""
        let_go = asyncio.Event()

        async def gate(request: Request) -> Response:
            if request.path == "/gate/activate" and request.method == "POST":
                let_go.set()
            return Response(body=b"OK", kind="text/plain")

        server = HttpServer(gate, self._faults, self._die)
        await server.open(host, port)
        await let_go.wait()

    # ---- dispatch ---------------------------------------------------------------------------------------------------

    async def _handle(self, request: Request) -> Response:
        key = self._settings["admin_api_key"]
        control = not request.path.startswith(_OPEN)
        if key and control and request.headers.get("authorization") != f"Bearer {key}":
            return json_response({"error": "Unauthorized"}, 401)
        if request.method == "GET" and request.path in self._gets:
            return self._gets[request.path]()
        route = self._posts.get(request.path)
        if route is None or (request.method != "POST" and request.path != "/flush_cache"):
            return json_response({"detail": "Not Found"}, 404)
        try:
            return await route(request)
        except Refused as refusal:
            if refusal.facts:
                return json_response({"message": str(refusal), **refusal.facts}, refusal.status)
            return error_response(str(refusal), refusal.status)
        except (ValueError, KeyError, TypeError) as error:
            return error_response(f"{type(error).__name__}: {error}")

    # ---- generation -------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        body = request.json()
        if "traceparent" in request.headers:
            self._contexts[str(body["rid"])] = request.headers["traceparent"]
        parameters = body.get("sampling_params") or {}
        unknown = sorted(parameters.keys() - _PARAMETERS)
        if unknown:
            raise Refused(f"unknown sampling parameter {unknown[0]}")
        room = None
        if body.get("bootstrap_room") is not None:
            host, port = str(body.get("bootstrap_host")), int(body.get("bootstrap_port") or 0)
            room = (host, port, int(body["bootstrap_room"]))
        stops = () if parameters.get("ignore_eos") else parameters.get("stop_token_ids") or ()
        new = StandInRequest(
            rid=str(body["rid"]),
            prompt=[int(token) for token in body["input_ids"]],
            limit=int(parameters.get("max_new_tokens", 128)),
            stop=frozenset(stops),
            room=room,
        )
        # While paused the call waits silently until generation goes on.
        await self.engine.admitting.wait()
        try:
            self.engine.admit(new)
        except Refused as refusal:
            return Response(kind="text/event-stream", events=_refusal(str(refusal)))
        return Response(kind="text/event-stream", events=self._events(new))

    async def _events(self, request: StandInRequest) -> AsyncIterator[bytes]:
        try:
            while (event := await request.events.get()) is not None:
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.engine.leave(request)

    async def _abort(self, request: Request) -> Response:
        body = request.json()
        if body.get("abort_all"):
            self.engine.abort(None)
        elif body.get("rid"):
            self.engine.abort(str(body["rid"]))
        return Response()

    # ---- hand-over --------------------------------------------------------------------------------------------------

    async def _handle_bootstrap(self, request: Request) -> Response:
        """The prefill side: where decode servers find KV. Its rooms come when their prefill is done."""
        engine = self.engine
        if request.path == "/route":
            return json_response({"epoch": engine.role_epoch}, 200 if engine.mode == "prefill" else 503)
        if request.path.startswith("/kv/"):
            room = int(request.path.removeprefix("/kv/"))
            until_s = asyncio.get_running_loop().time() + float(self._settings["waiting_s"])
            while room not in engine.rooms:
                if asyncio.get_running_loop().time() > until_s or engine.mode != "prefill":
                    return json_response({}, 404)
                await asyncio.sleep(0.002)
            return json_response({"cached": engine.rooms.pop(room)})
        return Response()

    async def _pull(self, request: StandInRequest) -> int:
        """The decode side: fetch the KV of a request from its prefill server."""
        assert request.room is not None
        host, port, room = request.room
        route = await _fetch(host, port, "/route", _ROUTE_S)
        known = self._routes_known.setdefault((host, port), int(route["epoch"]))
        if self._stale_routes and known != route["epoch"]:
            # Messages go to a port that nobody reads any more; only a long time limit ends this.
            await asyncio.sleep(float(self._settings["waiting_s"]))
            self._routes_known.pop((host, port), None)
            raise Refused("waited too long for KV")
        answer = await _fetch(host, port, f"/kv/{room}", float(self._settings["waiting_s"]) + 1.0)
        return int(answer["cached"])

    # ---- control ----------------------------------------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        await self.engine.pause(str(request.json().get("mode", "abort")))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        request.json()
        self.engine.carry_on()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: Request) -> Response:
        until_s = asyncio.get_running_loop().time() + float(request.query.get("timeout", ["0"])[0])
        while True:
            try:
                self.engine.flush()
            except Refused as refusal:
                if asyncio.get_running_loop().time() >= until_s:
                    return Response(400, str(refusal).encode(), "text/plain")
                await asyncio.sleep(0.01)
            else:
                return Response(body=b"Cache flushed.\n", kind="text/plain")

    async def _release(self, request: Request) -> Response:
        self.engine.release(list(request.json().get("tags") or []))
        return json_response(None)

    async def _resume(self, request: Request) -> Response:
        self.engine.resume(list(request.json().get("tags") or []))
        return json_response(None)

    async def _begin(self, request: Request) -> Response:
        request.json()
        self.engine.begin_update()
        return json_response({"success": True, "message": "Success"})

    async def _end(self, request: Request) -> Response:
        request.json()
        self.engine.end_update()
        return json_response({"success": True, "message": "Success"})

    async def _from_disk(self, request: Request) -> Response:
        body = request.json()
        flush = bool(body.get("flush_cache", True))
        self.engine.load(Path(body["model_path"]), _version(body), flush=flush)
        return json_response(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def _from_tensor(self, request: Request) -> Response:
        """Tensors are not looked into: the stand-in then holds weights of no known checksum."""
        body = request.json()
        self.engine.require_session("update_weights_from_tensor")
        return self._replaced(body)

    async def _from_ipc(self, request: Request) -> Response:
        """Takes everything that is shared, and looks into none of it."""
        body = request.json()
        handles, device = body["zmq_handles"], f"GPU-{platform.machine()}"
        if device not in handles:
            raise Refused(f"Device UUID {device} not found in zmq_handles: {list(handles)}", success=False)
        body["shared"] = await _take_shared(str(handles[device]), _SHARED_S)
        return self._replaced(body)

    async def _from_group(self, request: Request) -> Response:
        body = request.json()
        self.engine.require_session("update_weights_from_distributed")
        if body.get("group_name") not in self.engine.groups:
            raise Refused(f"group {body.get('group_name')} does not exist", success=False)
        return self._replaced(body)

    def _replaced(self, body: dict[str, Any]) -> Response:
        self.engine.weights = Weights.of({"model.norm.weight": str(hash(json.dumps(body, sort_keys=True)))})
        self.engine.version = _version(body) or self.engine.version
        if body.get("flush_cache", True):
            self.engine.flush()
        return json_response({"success": True, "message": "Success"})

    async def _join_group(self, request: Request) -> Response:
        self.engine.groups.add(str(request.json()["group_name"]))
        return json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def _leave_group(self, request: Request) -> Response:
        name = str(request.json()["group_name"])
        if name not in self.engine.groups:
            raise Refused("The group to be destroyed does not exist.", success=False)
        self.engine.groups.remove(name)
        return json_response({"success": True, "message": "Succeeded to destroy custom process group."})

    async def _set_version(self, request: Request) -> Response:
        body = request.json()
        if not isinstance(body["new_version"], str):
            raise Refused("new_version: Input should be a valid string")
        if body.get("abort_all_requests", True):
            self.engine.abort(None)
        self.engine.version = body["new_version"]
        return json_response(
            {"success": True, "message": "Weight version updated.", "new_version": self.engine.version}
        )

    async def _checksum(self, request: Request) -> Response:
        del request
        found = self.engine.weights.checksums if "weights" not in self.engine.released else {}
        return json_response(
            {
                "success": True,
                "message": "Success.",
                "ranks": [{"checksums": found, "per_gpu_checksum": f"{self.engine.weights.seed:016x}"}],
                "per_engine_checksum": f"{self.engine.weights.seed:016x}",
            }
        )

    async def _switch(self, request: Request) -> Response:
        body = request.json()
        answer = self.engine.switch(
            str(body.get("new_role") or ""),
            graph_gb=body.get("decode_cuda_graph_memory_gb"),
            prepare_only=bool(body.get("prepare_only")),
        )
        return json_response(answer)

    async def _set_faults(self, request: Request) -> Response:
        """What shall go wrong; not part of SGLang."""
        body = request.json()
        self._faults.drop_after_bytes.update(body.get("drop_after_bytes", {}))
        self._faults.die_after_bytes.update(body.get("die_after_bytes", {}))
        self._faults.hang = set(body.get("hang", []))
        self._stale_routes = bool(body.get("stale_routes", False))
        self.engine.memory.stuck = bool(body.get("release_frees_nothing", False))
        self.engine.fail_next_switch = bool(body.get("fail_next_switch", False))
        return json_response({})

    # ---- facts ------------------------------------------------------------------------------------------------------

    def _model_info(self) -> Response:
        return json_response(
            {
                "model_path": self._settings["model_path"],
                "weight_version": self.engine.version,
                "disaggregation_mode": self.engine.mode,
            }
        )

    def _server_info(self) -> Response:
        state = {"disaggregation_mode": self.engine.mode, "memory_usage": {}, "decode_cuda_graph_bs": []}
        return json_response({**self._settings, "version": VERSION, "internal_states": [state]})

    def _loads(self) -> Response:
        engine = self.engine
        load = {
            "num_running_reqs": len(engine.running),
            "num_waiting_reqs": len(engine.waiting),
            "num_used_tokens": sum(len(r.prompt) + len(r.tokens) for r in engine.running),
            "max_total_num_tokens": self._settings["max_total_tokens"],
            "total_prefill_uncached_tokens": engine.prefill_tokens,
            "total_prefill_busy_us": engine.prefill_us,
            "decode_moments": engine.moments if engine.moments[0] else None,
            "disaggregation": {
                "mode": engine.mode,
                "prefill_inflight_queue_reqs": len(engine.rooms),
                "decode_transfer_queue_reqs": len(engine.transferring),
            },
        }
        return json_response({"version": VERSION, "loads": [load]})

    def _metrics(self) -> Response:
        text = f'sglang:num_running_reqs{{engine_type="dynamic"}} {len(self.engine.running)}\n'
        return Response(body=text.encode(), kind="text/plain")


async def _refusal(message: str) -> AsyncIterator[bytes]:
    """A stream always begins with status 200; what is wrong comes as an event."""
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _version(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise Refused("weight_version: Input should be a valid string")
    return version


async def _take_shared(address: str, limit_s: float) -> str:
    """Be the receiving side of checkpoint-engine's protocol. Returns a digest of all that came."""
    import zmq
    import zmq.asyncio

    nothing = pickle.dumps(None)[2:]
    digest = hashlib.sha256()
    connection = zmq.asyncio.Context.instance().socket(zmq.REP)
    connection.linger = 0
    try:
        connection.connect(address)
        async with asyncio.timeout(limit_s):
            released = ended = False
            while not ended:
                message = await connection.recv()
                # What it is, its first two bytes do not say: they are the protocol's version.
                ended, released = released, message[2:] == nothing
                digest.update(message)
                await connection.send(b"")
    except TimeoutError:
        raise Refused(f"nobody shared weights at {address} within {limit_s:g} s", success=False) from None
    finally:
        connection.close()
    return digest.hexdigest()


async def _fetch(host: str, port: int, path: str, limit_s: float) -> dict[str, Any]:
    """A `GET` of JSON. Raises `OSError`, `TimeoutError`, or `Refused` for any status but 200."""
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length:")[2].split("\r\n")[0])
                body = await reader.readexactly(length)
            except asyncio.IncompleteReadError:
                raise ConnectionResetError("Lost connection with prefill instance") from None
        finally:
            writer.close()
    if head.split()[1] != "200":
        raise Refused(f"{path} answered {head.split()[1]}")
    found = json.loads(body)
    assert isinstance(found, dict)
    return found
