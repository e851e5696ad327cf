"""What tests with real SGLang on a CPU share: its environment, the fork server, options, and tiny models."""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from array import array
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
    """A running fork server; yields the command that behaves like its environment's Python.

    `PEARL_SGLANG_FORKS` names the socket of one that runs already, in the same session, while one works on tests.
    """
    if os.environ.get("PEARL_SGLANG_FORKS"):
        yield (sys.executable, str(HERE / "interpreter.py"), os.environ["PEARL_SGLANG_FORKS"])
        return
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


def tiny_model(folder: Path, seed: int, vocabulary: int = 300) -> Path:
    """A random Qwen3 of about 80,000 float32 parameters, written without torch. The tokenizer is not its concern."""
    hidden, layers, heads, kv_heads, width, inner = 64, 2, 4, 2, 16, 128
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "intermediate_size": inner,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
            f"{name}self_attn.q_proj.weight": (heads * width, hidden),
            f"{name}self_attn.k_proj.weight": (kv_heads * width, hidden),
            f"{name}self_attn.v_proj.weight": (kv_heads * width, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, heads * width),
            f"{name}self_attn.q_norm.weight": (width,),
            f"{name}self_attn.k_norm.weight": (width,),
            f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
        }
    draw = random.Random(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in sorted(shapes.items()):
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        values = array("f", [1.0] * count if len(shape) == 1 else [draw.gauss(0.0, 0.15) for _ in range(count)])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
        data += values.tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder
