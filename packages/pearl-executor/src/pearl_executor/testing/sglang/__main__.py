"""Behaves like a Python that has SGLang: `python -m pearl_executor.testing.sglang -c CODE`."""

import argparse
import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pearl_executor.engines.sglang.options import VERSION
from pearl_executor.testing.sglang.server import StandInServer


class Settings(dict[str, Any]):
    """What the stand-in was started with."""

    def resolve_once(self) -> None:
        """There is nothing to resolve."""


def parse(arguments: list[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """What the stand-in needs of SGLang's arguments; it takes any others too."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--admin-api-key", default="")
    parser.add_argument("--max-total-tokens", type=int, default=4096)
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
    parser.add_argument("--gated-launch-port", type=int, default=0)
    parser.add_argument("--enable-memory-saver", action="store_true")
    known, _ = parser.parse_known_args(arguments)
    settings = Settings(vars(known))
    settings["step_s"] = float(environment.get("PEARL_STANDIN_STEP_S", "0.001"))
    settings["waiting_s"] = float(environment.get("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "30"))
    return settings


def launch_server(settings: Settings, *, run_scheduler_process_func: object) -> None:
    """Serve until the process ends. It needs no scheduler."""
    del run_scheduler_process_func
    # As SGLang does: its arguments go to its log.
    print(f"server_args={settings}", flush=True)
    asyncio.run(StandInServer(settings).serve())


def main() -> None:
    """Run the code with modules in the places of SGLang's."""
    if len(sys.argv) < 3 or sys.argv[1] != "-c":
        raise SystemExit("only -c CODE")
    served, arguments = ModuleType("sglang.srt.entrypoints.http_server"), ModuleType("sglang.srt.server_args")
    served.launch_server = launch_server  # type: ignore[attr-defined]
    arguments.prepare_server_args = parse  # type: ignore[attr-defined]
    packages = ("sglang", "sglang.srt", "sglang.srt.entrypoints", "mooncake", "mooncake.engine")
    sys.modules.update({name: ModuleType(name) for name in packages})
    sys.modules.update({module.__name__: module for module in (served, arguments)})
    version = os.environ.get("PEARL_STANDIN_VERSION", VERSION)

    def told(distribution_name: str) -> str:
        return version if distribution_name == "sglang" else ""

    importlib.metadata.version = told
    exec(compile(sys.argv[2], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
