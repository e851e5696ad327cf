"""From a worker's row to SGLang's command line and environment. Pure."""

from dataclasses import dataclass

from pearl_executor.engines.sglang.options import SglangOptions
from pearl_executor.engines.sglang.served import OPEN_PORTS
from pearl_state.roles import Role

PD_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """TCP ports of one server; all distinct."""

    http: int
    bootstrap: int
    """Where decode servers find a prefill server's KV. With role switches every PD server binds one."""
    gate: int
    """Where a gated start is let go."""


def launch_flags(
    options: SglangOptions, ports: Ports, *, disaggregated: bool, weight_version: int, admin_key: str, gated: bool
) -> list[str]:
    """SGLang's arguments.

    Every disaggregated server starts as decode, with the decode radix cache on, and is flipped where it shall prefill:
    decode graphs are then captured once and stay, and prefixes are kept in both roles.
    """
    flags = [
        *("--model-path", str(options.model_dir)),
        *("--host", options.host),
        *("--port", str(ports.http)),
        *("--device", options.device),
        *("--dtype", options.dtype),
        *("--tp-size", str(options.gpus_per_worker)),
        *("--load-format", options.load_format),
        *("--weight-version", str(weight_version)),
        *("--max-running-requests", str(options.max_running)),
        *("--random-seed", str(options.seed)),
        *("--admin-api-key", admin_key),
        "--enable-memory-saver",
        *("--cuda-graph-backend-prefill", "disabled"),
        "--skip-server-warmup",
        "--incremental-streaming-output",
        "--enable-metrics",
    ]
    if options.kv_tokens:
        flags += ["--max-total-tokens", str(options.kv_tokens)]
    if options.memory_fraction:
        flags += ["--mem-fraction-static", str(options.memory_fraction)]
    if options.prefill_chunk_tokens:
        flags += ["--chunked-prefill-size", str(options.prefill_chunk_tokens)]
    if gated:
        flags += ["--gated-launch-port", str(ports.gate)]
    if disaggregated:
        flags += [
            *("--disaggregation-mode", "decode"),
            *("--disaggregation-transfer-backend", options.transfer_backend),
            *("--disaggregation-bootstrap-port", str(ports.bootstrap)),
            "--enable-pd-role-switch",
            "--disaggregation-decode-enable-radix-cache",
        ]
    return [*flags, *options.extra_args]


def launch_environment(options: SglangOptions, gpus: str) -> dict[str, str]:
    """Environment of one server, beyond the inherited one; `gpus` as CUDA names them, comma-separated."""
    environment = {
        # A health probe that generates would run on released memory, and block while paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # A request whose prefill server went or changed its role must fail soon, not in five minutes.
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
        "SGLANG_HOST_IP": options.host,
        # Its requests were aborted and collected before: on SIGTERM there is nothing to wait for.
        "SGL_FORCE_SHUTDOWN": "1",
    }
    if options.open_ports:
        environment[OPEN_PORTS] = "1"
    if options.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = gpus
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    return {**environment, **options.env}
