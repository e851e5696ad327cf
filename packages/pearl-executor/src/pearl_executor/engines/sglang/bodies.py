"""Request bodies of SGLang 0.5.23's HTTP API. Pure; validated against SGLang's own structs in its test session."""

from collections.abc import Mapping, Sequence
from typing import Any

from pearl_executor.ports import GenerateRequest
from pearl_state.roles import Role

Body = dict[str, Any]


def generate(request: GenerateRequest, bootstrap: tuple[str, int, int] | None = None) -> Body:
    """`POST /generate`, streamed. `bootstrap` is (host, port, room) under disaggregation; both servers get the same."""
    sampling = request.sampling
    parameters: Body = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    else:
        # Without stop tokens the model's own end token is a token like any other.
        parameters["ignore_eos"] = True
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    body: Body = {
        "rid": request.rid,
        "input_ids": list(request.prompt),
        "sampling_params": parameters,
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if request.affinity:
        body["routing_key"] = request.affinity
    if bootstrap is not None:
        body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"] = bootstrap
    return body


def abort(rid: str) -> Body:
    """`POST /abort_request`. SGLang aborts every request whose id begins with `rid`: ids have one width."""
    return {"rid": rid}


def abort_all() -> Body:
    """`POST /abort_request`."""
    return {"abort_all": True}


def pause(mode: str) -> Body:
    """`POST /pause_generation`: "abort", "retract" or "in_place"."""
    return {"mode": mode}


def tags(*names: str) -> Body:
    """`POST /release_memory_occupation` and `/resume_memory_occupation`."""
    return {"tags": list(names)}


def role_switch(role: Role, graph_gb: float | None = None, *, prepare_only: bool = False) -> Body:
    """`POST /pd_role_switch`."""
    body: Body = {"new_role": role.value, "prepare_only": prepare_only}
    if role is Role.DECODE and graph_gb is not None:
        body["decode_cuda_graph_memory_gb"] = graph_gb
    return body


def weights_from_disk(folder: str, version: int) -> Body:
    """`POST /update_weights_from_disk`. The cache is flushed apart: its refusal would look like one of the update."""
    return {"model_path": folder, "weight_version": str(version), "flush_cache": False, "abort_all_requests": False}


def weights_from_tensor(payloads: Sequence[str], version: int | None) -> Body:
    """`POST /update_weights_from_tensor`: one payload a tensor-parallel rank; `version` with the last bucket only."""
    return {
        "serialized_named_tensors": list(payloads),
        "flush_cache": False,
        "weight_version": None if version is None else str(version),
    }


def weights_group(address: str, port: int, offset: int, world: int, name: str, backend: str) -> Body:
    """`POST /init_weights_update_group`."""
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": offset,
        "world_size": world,
        "group_name": name,
        "backend": backend,
    }


def weights_from_group(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str, version: int | None
) -> Body:
    """`POST /update_weights_from_distributed`: tensors in the order in which rank 0 broadcasts them."""
    return {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group,
        "flush_cache": False,
        "weight_version": None if version is None else str(version),
    }


def weights_from_ipc(handles: Mapping[str, str], version: int) -> Body:
    """`POST /update_weights_from_ipc`: device → socket of whoever shares the tensors with it; no session around it."""
    return {"zmq_handles": dict(handles), "flush_cache": False, "weight_version": str(version)}


def leave_group(name: str) -> Body:
    """`POST /destroy_weights_update_group`."""
    return {"group_name": name}


def checksum() -> Body:
    """`POST /weights_checker`."""
    return {"action": "checksum"}
