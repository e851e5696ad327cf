"""What measures the embedded engine on a GPU runs whole on a CPU, with a model of a few thousand parameters."""

import json

import pytest

from benchmarks.gpu import bench_engine
from pearl_planner.catalog import ModelSpec, find_gpu, find_model

pytestmark = pytest.mark.torch
TINY = ModelSpec(
    name="tiny",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=64,
    vocab=128,
    max_position=512,
    params_total=30_000.0,
    params_active=30_000.0,
    flops_per_token=60_000.0,
    attention_flops_per_context_token=128.0,
    kv_bytes_per_token=128.0,
)


def test_the_bench_measures_fits_compares_and_releases():
    plan = bench_engine.Plan(
        model=TINY,
        gpu=find_gpu("h200"),
        device="cpu",
        contexts=(16, 64),
        sequences=(4, 2, 1),
        iterations=4,
        chunks=(16, 64, 128),
        repeats=2,
    )
    found = json.loads(json.dumps(bench_engine.measure(plan)))
    assert len(found["iterations"]) == 2 * 3 + 3
    for row in found["iterations"]:
        assert 0 < row["fastest_ms"] <= row["measured_ms"]
        assert row["roofline_ms"] > 0
        assert row["tables_ms"] > 0
    for fit in found["fits"]:
        # What a busy machine's figures do not carry is refused with a reason, as in a run.
        for name in ("decode_fixed_s", "decode_per_sequence_s", "prefill_per_token_s"):
            assert (name in fit["fitted"]) != (name in fit["refused"])
    memory = found["memory"]
    assert memory["after_bytes"] < 0.2 * memory["before_bytes"]
    assert memory["resumed_bytes"] == memory["before_bytes"]
    assert memory["kv_bytes"] > 0
    text = bench_engine.table(found)
    assert "| decode 4 x 64 |" in text
    assert "load from disk" in text


def test_the_plan_fits_one_h200():
    """Its KV, the weights and room for activations."""
    plan = bench_engine.Plan(model=find_model("qwen3-8b"), gpu=find_gpu("h200"))
    held = plan.model.weight_bytes + plan.limits.kv_tokens * plan.model.kv_bytes_per_token
    assert held < 0.8 * plan.gpu.hbm_bytes
