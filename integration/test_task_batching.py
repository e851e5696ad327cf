"""Task batching on the torch engine: with a KV budget that thrashes, prefixes stay where they are needed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
pytest.importorskip("transformers")

from bench_task_batching import Load, Shape, engine_factory

pytestmark = pytest.mark.torch


def test_task_batching_raises_the_measured_hit_rate_of_the_torch_engine(tmp_path: Path) -> None:
    """The engine counts; TideRL section 6.5 reports 1.58 times. Tokens per second are the benchmark's to measure."""
    shape = Shape(tasks=12, turns=4, kv_tokens=900)
    engine_of = engine_factory(shape, tmp_path)
    loads = [Load(shape, engine_of(), batched) for batched in (False, True)]
    for load in loads:
        load.run()
    requests, tasks = loads
    assert requests.generated_tokens == tasks.generated_tokens == 12 * 4 * shape.response_tokens
    assert requests.prompt_tokens == tasks.prompt_tokens
    assert tasks.cached_tokens >= 1.5 * requests.cached_tokens
    assert tasks.cached_tokens >= 0.3 * tasks.prompt_tokens
