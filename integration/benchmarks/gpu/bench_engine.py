"""The embedded engine on a GPU: decode, prefill and memory, beside the roofline and the tables of measured kernels.

`python integration/benchmarks/gpu/bench_engine.py` needs one CUDA device and nothing else: a model of Qwen3-8B's shapes
with random weights is written into a temporary folder (16 GB). Prints a Markdown table and writes all figures as JSON.
What the planner's A, b and t_prefill come to is found by the product's own fit, from the engine's own iterations.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from pearl_executor.engines.torch.engine import Engine, EngineLimits, Phase
from pearl_executor.ports import GenerateRequest, Sampling
from pearl_planner.catalog import GpuSpec, ModelSpec, find_gpu, find_model
from pearl_planner.fit import fit_platform
from pearl_planner.roofline import decode_iteration_s, platform_profile, prefill_token_s
from pearl_rl.simulation.kernels import WorkerCosts
from pearl_state.roles import Role
from pearl_state.samples import DecodeSample, PrefillSample

T = TypeVar("T")
HERE = Path(__file__).parent
SHARD_BYTES = 1 << 30
GREEDY = Sampling(temperature=0.0)
WARM = 2
"""Iterations before the first that counts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and on what."""

    model: ModelSpec
    gpu: GpuSpec
    """Whose peak figures the roofline takes."""
    device: str = "cuda"
    contexts: tuple[int, ...] = (1024, 4096, 8192)
    sequences: tuple[int, ...] = (64, 48, 32, 24, 16, 8, 4, 2, 1)
    """Running at the same time; falling, for each smaller number is what is left of the one before."""
    iterations: int = 12
    chunks: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    """Prompt tokens of one prefill iteration."""
    repeats: int = 5
    seed: int = 0

    @property
    def room_tokens(self) -> int:
        """New tokens of the longest request."""
        return len(self.sequences) * (self.iterations + WARM) + 8

    @property
    def limits(self) -> EngineLimits:
        longest = max(*self.contexts, *self.chunks) + self.room_tokens
        return EngineLimits(
            max_running=max(self.sequences),
            kv_tokens=max(self.sequences) * (max(self.contexts) + self.room_tokens) + longest,
            prefill_chunk_tokens=max(self.chunks),
            max_context_tokens=longest,
        )


@dataclass
class Figures:
    """What was measured."""

    decode: list[DecodeSample] = field(default_factory=list)
    prefill: list[PrefillSample] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    parts_s: dict[str, float] = field(default_factory=dict)


class Bench:
    """One engine, and all that is asked of it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder, self.figures = plan, folder, Figures()
        self._number = 0
        self._timed("write the model", lambda: write_model(plan, folder))
        self.engine = self._timed("build the engine", self._build)

    def _build(self) -> Engine:
        return Engine(
            self.folder,
            role=Role.COLOCATED,
            limits=self.plan.limits,
            device=self.plan.device,
            seed=self.plan.seed,
            weight_version=1,
        )

    def run(self) -> Figures:
        """Everything, in an order in which nothing is measured cold."""
        self._timed("prefill", self._prefill)
        for context in self.plan.contexts:
            self._timed(f"decode at {context} tokens", lambda context=context: self._decode(context))
        self._timed("release and resume", self._memory)
        return self.figures

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        begun_s = time.perf_counter()
        result = work()
        self.figures.parts_s[name] = round(time.perf_counter() - begun_s, 3)
        print(f"# {name}: {self.figures.parts_s[name]:.1f} s", file=sys.stderr, flush=True)
        return result

    def _ask(self, tokens: int, new_tokens: int) -> str:
        """Queue a request with a prompt of its own."""
        self._number += 1
        generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + self._number)
        prompt = torch.randint(0, self.plan.model.vocab, (tokens,), generator=generator).tolist()
        rid = f"r{self._number:06d}"
        self.engine.add(
            GenerateRequest(rid=rid, prompt=prompt, max_new_tokens=new_tokens, sampling=GREEDY, affinity=rid)
        )
        return rid

    def _steps(self) -> Iterator[tuple[Phase, float]]:
        while self.engine.has_work:
            output = self.engine.step()
            yield output.phase, output.compute_s

    def _prefill(self) -> None:
        for tokens in self.plan.chunks:
            for repeat in range(self.plan.repeats + 1):
                self._ask(tokens, 1)
                times = [seconds for phase, seconds in self._steps() if phase is Phase.PREFILL]
                if repeat:
                    self.figures.prefill.append(PrefillSample(tokens, sum(times)))

    def _decode(self, context: int) -> None:
        """Begin with the most sequences, and end some whenever enough iterations were seen."""
        alive = [self._ask(context, self.plan.room_tokens) for _ in range(max(self.plan.sequences))]
        steps = self._steps()
        for count in self.plan.sequences:
            for rid in alive[count:]:
                self.engine.abort(rid)
            del alive[count:]
            seen = 0
            while seen < WARM + self.plan.iterations:
                phase, seconds = next(steps)
                if phase is not Phase.DECODE:
                    continue
                seen += 1
                if seen > WARM:
                    self.figures.decode.append(DecodeSample(count, 1, seconds, context))
        self.engine.abort(None)
        for _ in steps:
            pass

    def _memory(self) -> None:
        """Give weights and KV back, take them again, load, and say the same as before."""
        before = self._says()
        memory = self.figures.memory

        def clocked(name: str, work: Callable[[], object]) -> object:
            begun_s = time.perf_counter()
            result = work()
            if self.plan.device == "cuda":
                torch.cuda.synchronize()
            memory[f"{name}_s"] = time.perf_counter() - begun_s
            return result

        released = clocked("release", self.engine.release)
        resumed = clocked("resume", self.engine.resume)
        clocked("load", lambda: self.engine.load_weights(self.folder, 2))
        memory["before_bytes"] = released.before_bytes
        memory["after_bytes"] = released.after_bytes
        memory["resumed_bytes"] = resumed.after_bytes
        memory["weight_bytes"] = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
        memory["kv_bytes"] = released.before_bytes - released.after_bytes - memory["weight_bytes"]
        if self._says() != before:
            raise RuntimeError("other tokens after release, resume and load than before")

    def _says(self) -> tuple[int, ...]:
        rid = f"says{self._number}"
        self.engine.add(GenerateRequest(rid=rid, prompt=list(range(16)), max_new_tokens=8, sampling=GREEDY))
        while self.engine.has_work:
            if (done := self.engine.step().finished.get(rid)) is not None:
                return tuple(done.tokens)
        raise AssertionError("a request without an end")


def write_model(plan: Plan, folder: Path) -> None:
    """A Qwen3 of the plan's shapes with random weights, as files."""
    spec = plan.model
    dtype = torch.bfloat16 if plan.device == "cuda" else torch.float32
    config = Qwen3Config(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate,
        max_position_embeddings=max(spec.max_position, plan.limits.max_context_tokens),
        tie_word_embeddings=False,
        dtype=dtype,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    generator = torch.Generator(device=plan.device).manual_seed(plan.seed)
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    for at, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 1:
            value = torch.ones(shape, dtype=dtype)
        else:
            drawn = torch.empty(shape, dtype=dtype, device=plan.device).normal_(std=0.02, generator=generator)
            value = drawn.cpu()
        shard[name] = value
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES or at + 1 == len(shapes):
            file = f"model-{len(files):05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(shard, file)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def compared(plan: Plan, figures: Figures) -> list[dict[str, object]]:
    """Each kind of iteration: the median measured, by the roofline, and by the tables of kernels, milliseconds."""
    tables = WorkerCosts(plan.model, plan.gpu, 1)
    rows: list[dict[str, object]] = []
    for context in plan.contexts:
        for count in plan.sequences:
            times = [s.duration_s for s in figures.decode if (s.sequences, s.context_tokens) == (count, context)]
            roofline = decode_iteration_s(plan.model, plan.gpu, 1, sequences=count, context_tokens=context)
            table = tables.decode_curve(count).iteration_s(context)
            rows.append(_row("decode", f"{count} x {context}", times, roofline, table))
    for tokens in plan.chunks:
        times = [sample.duration_s for sample in figures.prefill if sample.tokens == tokens]
        roofline = tokens * prefill_token_s(plan.model, plan.gpu, 1, context_tokens=tokens / 2)
        rows.append(_row("prefill", f"{tokens}", times, roofline, tables.prefill_s([(tokens, 0)], 1)))
    return rows


def _row(kind: str, what: str, times: list[float], roofline_s: float, table_s: float) -> dict[str, object]:
    ms = {"measured_ms": median(times), "fastest_ms": min(times), "roofline_ms": roofline_s, "tables_ms": table_s}
    return {"kind": kind, "what": what, **{name: float(f"{1e3 * value:.5g}") for name, value in ms.items()}}


def fits(plan: Plan, figures: Figures) -> list[dict[str, object]]:
    """A, b and t_prefill as the product fits them, at each context, beside the roofline's."""
    rows: list[dict[str, object]] = []
    for context in plan.contexts:
        prior = platform_profile(
            plan.model, plan.gpu, 1, context_tokens=context, most_sequences=max(2, *plan.sequences)
        )
        decode = [sample for sample in figures.decode if sample.context_tokens == context]
        # One context at a time: the fit over contexts needs all of them, and that over sequences none.
        alike = [DecodeSample(s.sequences, s.iterations, s.duration_s) for s in decode]
        found = fit_platform(decode=alike, prefill=figures.prefill, prior=prior)
        names = ("decode_fixed_s", "decode_per_sequence_s", "prefill_per_token_s")
        rows.append(
            {
                "context": context,
                "fitted": {name: getattr(found.profile, name) for name in names if name in found.used},
                "roofline": {name: getattr(prior, name) for name in names},
                "refused": dict(found.refused),
                "median_deviation": dict(found.residuals),
            }
        )
    return rows


def report(plan: Plan, figures: Figures) -> dict[str, object]:
    """All figures as JSON."""
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU"
    return {
        "device": name,
        "torch": torch.__version__,
        "model": plan.model.name,
        "roofline_of": plan.gpu.name,
        "plan": {key: value for key, value in asdict(plan).items() if key not in ("model", "gpu")},
        "iterations": compared(plan, figures),
        "fits": fits(plan, figures),
        "memory": {key: round(value, 4) for key, value in figures.memory.items()},
        "parts_s": figures.parts_s,
    }


def table(found: dict[str, object]) -> str:
    """The report for people, as Markdown."""
    lines = [f"{found['model']} with random weights, embedded engine, {found['device']}, torch {found['torch']}", ""]
    lines += ["| iteration | measured, ms | roofline, ms | kernel tables, ms |", "|---|---|---|---|"]
    for row in found["iterations"]:
        cells = [f"{row[name]:.2f}" for name in ("measured_ms", "roofline_ms", "tables_ms")]
        lines.append(f"| {row['kind']} {row['what']} | {' | '.join(cells)} |")
    lines += ["", "| context | A, ms | b, ms | t_prefill, us | of the roofline |", "|---|---|---|---|---|"]
    for row in found["fits"]:
        scales = {"decode_fixed_s": 1e3, "decode_per_sequence_s": 1e3, "prefill_per_token_s": 1e6}
        got = [f"{row['fitted'][n] * by:.3f}" if n in row["fitted"] else "not fitted" for n, by in scales.items()]
        prior = ", ".join(f"{row['roofline'][n] * by:.3f}" for n, by in scales.items())
        lines.append(f"| {row['context']} | {' | '.join(got)} | {prior} |")
    memory = found["memory"]
    gib = {name: memory[f"{name}_bytes"] / 2**30 for name in ("before", "after", "resumed", "weight", "kv")}
    lines += ["", "| memory | GiB | | seconds |", "|---|---|---|---|"]
    lines.append(f"| held before (weights {gib['weight']:.2f}, KV {gib['kv']:.2f}) | {gib['before']:.2f} | | |")
    lines.append(f"| after release | {gib['after']:.2f} | release | {memory['release_s']:.3f} |")
    lines.append(f"| after resume | {gib['resumed']:.2f} | resume | {memory['resume_s']:.3f} |")
    lines.append(f"| | | load from disk | {memory['load_s']:.3f} |")
    return "\n".join(lines)


def measure(plan: Plan) -> dict[str, object]:
    """The whole bench in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        return report(plan, Bench(plan, Path(folder)).run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help="a dense model of the planner's catalog")
    parser.add_argument("--gpu", default="h200", help="whose peak figures the roofline takes, a name of the catalog")
    parser.add_argument("--contexts", type=int, nargs="+", default=Plan.contexts, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, nargs="+", default=Plan.sequences, help="at the same time, falling")
    parser.add_argument("--out", type=Path, default=HERE / "engine.json", help="where the figures go")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: this measures a GPU", file=sys.stderr)
        return 3
    plan = Plan(
        model=find_model(given.model),
        gpu=find_gpu(given.gpu),
        contexts=tuple(given.contexts),
        sequences=tuple(sorted(given.sequences, reverse=True)),
    )
    found = measure(plan)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
