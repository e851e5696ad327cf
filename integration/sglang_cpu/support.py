"""What tests with real SGLang on a CPU share: its environment, the fork server, options, and tiny models."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pearl_executor.engines.sglang.options import MemoryProbe, SglangOptions

HERE = Path(__file__).parent
PYTHON = os.environ.get("PEARL_SGLANG_PYTHON", "")
"""The Python of the environment that has SGLang; `nox -s sglang` makes it and sets this."""

CPU_ARGS = (
    "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
    "--disaggregation-decode-retraction-backup", "cpu_tensor",
)  # fmt: skip
"""What SGLang needs to be told on a CPU; an idle scheduler sleeps."""


def environment() -> dict[str, str]:
    """Of every process of the SGLang environment."""
    shims = {"PYTHONPATH": str(HERE / "shim"), "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    return {
        **os.environ,
        **shims,
        "MC_FORCE_TCP": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextmanager
def fork_server() -> Iterator[tuple[str, ...]]:
    """A running fork server; yields the command that behaves like its environment's Python."""
    with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
        path = str(Path(folder, "forks"))
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(
                [PYTHON, str(HERE / "fork_server.py"), path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # Its imports may print lines of their own first.
            while line := process.stdout.readline():
                if line.startswith(b"ready"):
                    break
            else:
                raise RuntimeError(f"the fork server did not start: {Path(folder, 'log').read_text()[-2000:]}")
            yield (sys.executable, str(HERE / "interpreter.py"), path)
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def cpu_options(interpreter: tuple[str, ...], model_dir: Path, **changes: object) -> SglangOptions:
    """SGLang on a CPU, small and exact."""
    values: dict[str, object] = {
        "interpreter": interpreter,
        "model_dir": model_dir,
        "device": "cpu",
        "dtype": "float32",
        "kv_tokens": 65536,
        "memory_fraction": 0.3,
        "max_running": 32,
        "transfer_backend": "mooncake_tcp",
        "memory_probe": MemoryProbe.PROCESS,
        "decode_graph_gb": 0.0,
        "weight_backend": "gloo",
        "extra_args": CPU_ARGS,
        "env": {"MC_FORCE_TCP": "1"},
    }
    return SglangOptions(**{**values, **changes})  # type: ignore[arg-type]
