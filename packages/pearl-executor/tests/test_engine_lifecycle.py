"""An engine's life beside its tokens: aborts, roles, memory given and taken, and what it measures."""

import gc
import os
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pearl_executor.engines.torch.contract import EngineError, EngineLimits, NotIdleError, Phase  # noqa: E402
from pearl_executor.pacing import Pace  # noqa: E402
from pearl_executor.ports import Finish, GenerateRequest, Sampling, WorkerError  # noqa: E402
from pearl_executor.runtimes.local.hosting import torch_recipe  # noqa: E402
from pearl_executor.runtimes.local.torch_engine import build  # noqa: E402
from pearl_state.roles import Role  # noqa: E402
from pearl_state.samples import DecodeSample, PrefillSample  # noqa: E402

pytestmark = pytest.mark.torch

GREEDY = Sampling(temperature=0.0)


def prompt_of(seed, size):
    draw = random.Random(seed)
    return [draw.randrange(1, 128) for _ in range(size)]


def request(rid, prompt, new=8, affinity=""):
    return GenerateRequest(rid=str(rid), prompt=prompt, max_new_tokens=new, sampling=GREEDY, affinity=affinity)


def test_a_recipe_says_on_how_many_threads_its_engines_compute(model_dir):
    limits = EngineLimits(max_running=2, kv_tokens=64, prefill_chunk_tokens=16, max_context_tokens=32)
    before = torch.get_num_threads()
    try:
        build(torch_recipe(model_dir("qwen3", 0), limits, threads=2).settings, Role.COLOCATED)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_abort_ends_requests_in_every_stage_and_reports_them_at_the_next_step(make_engine):
    engine = make_engine(max_running=2, prefill_chunk_tokens=10)
    engine.add(request("running", prompt_of(0, 5), new=30))
    engine.step()
    engine.step()
    engine.add(request("prefilling", prompt_of(1, 25)))
    engine.step()
    engine.add(request("waiting", prompt_of(2, 5)))
    engine.abort(None)
    assert engine.has_work
    output = engine.step()
    assert output.phase is Phase.IDLE
    assert {rid: (r.finish, len(r.tokens)) for rid, r in output.finished.items()} == {
        "running": (Finish.INTERRUPTED, 2),
        "prefilling": (Finish.INTERRUPTED, 0),
        "waiting": (Finish.INTERRUPTED, 0),
    }
    assert not engine.has_work
    assert engine.take_samples().kv_used_tokens == 0


def test_abort_of_one_request_leaves_the_others_alone_and_an_unknown_one_has_no_effect(make_engine, drive):
    engine, calm = make_engine(), make_engine()
    for rid in range(3):
        engine.add(request(rid, prompt_of(rid, 10)))
    calm.add(request(2, prompt_of(2, 10)))
    engine.abort("1")
    engine.abort("nobody")
    results, _ = drive(engine)
    assert [results[rid].finish for rid in "012"] == [Finish.LENGTH, Finish.INTERRUPTED, Finish.LENGTH]
    assert results["2"].tokens == drive(calm)[0]["2"].tokens


def test_what_an_aborted_request_computed_is_kept_for_its_resumption(make_engine, drive):
    engine = make_engine()
    prompt = prompt_of(3, 30)
    engine.add(request("a", prompt, new=20, affinity="t"))
    for _ in range(6):
        engine.step()
    engine.abort("a")
    partial = engine.step().finished["a"].tokens
    engine.add(request("b", [*prompt, *partial], new=20 - len(partial), affinity="t"))
    resumed = drive(engine)[0]["b"]
    assert resumed.cached_tokens == len(prompt) + len(partial) - 1


def test_a_request_id_that_is_in_the_engine_is_refused(make_engine):
    engine = make_engine()
    engine.add(request("r", [1, 2]))
    with pytest.raises(EngineError, match="in the engine already"):
        engine.add(request("r", [3]))
    engine.abort("r")
    with pytest.raises(EngineError, match="in the engine already"):
        engine.add(request("r", [3]))
    engine.step()
    engine.add(request("r", [3]))


def test_an_idle_step_returns_at_once(make_engine):
    output = make_engine(pace=Pace(decode_fixed_s=5.0)).step()
    assert (output.phase, output.paced_s) == (Phase.IDLE, 0.0)
    assert not output.finished


def rss_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_release_gives_the_bytes_back_to_the_system_and_reports_what_it_gave(make_engine, drive, model_dir):
    # Each tensor is larger than what the C library may keep for later (32 MiB).
    engine = make_engine(kv_tokens=600_000)
    for pool in (*engine._pool.keys, *engine._pool.values):
        pool.fill_(0.5)
    del pool
    tokens = 600_001 * 2 * 2 * 2 * 8 * 4
    held = rss_bytes()
    report = engine.release()
    assert report.before_bytes - report.after_bytes > tokens
    assert report.after_bytes < 10_000
    assert held - rss_bytes() > 0.9 * tokens


def test_after_release_and_resume_the_engine_serves_once_it_has_weights(make_engine, drive, model_dir):
    engine, other = make_engine(), make_engine()
    prompt = prompt_of(4, 20)
    engine.add(request("before", prompt, affinity="t"))
    before = drive(engine)[0]["before"].tokens
    released = engine.release()
    with pytest.raises(EngineError, match="load_weights first"):
        engine.add(request("r", prompt))
    resumed = engine.resume()
    assert (resumed.before_bytes, resumed.after_bytes) == (released.after_bytes, released.before_bytes)
    with pytest.raises(EngineError, match="load_weights first"):
        engine.add(request("r", prompt))
    engine.load_weights(model_dir(), 0)
    assert engine.held_tokens(prompt, "t") == 0
    engine.add(request("after", prompt))
    assert drive(engine)[0]["after"].tokens == before
    other.add(request("x", prompt))
    assert drive(other)[0]["x"].tokens == before


def test_memory_is_given_and_taken_only_in_turn_and_only_idle(make_engine, model_dir, drive):
    engine = make_engine()
    with pytest.raises(EngineError, match="release it first"):
        engine.resume()
    engine.add(request("r", [1, 2, 3]))
    for operation in (engine.release, lambda: engine.set_role(Role.DECODE)):
        with pytest.raises(NotIdleError, match="1 requests"):
            operation()
    assert len(drive(engine)[0]["r"].tokens) == 8
    engine.release()
    with pytest.raises(EngineError, match="resume it first"):
        engine.release()
    with pytest.raises(EngineError, match="resume it first"):
        engine.load_weights(model_dir(), 9)
    assert engine.weight_version == 0
    engine.resume()
    with pytest.raises(EngineError, match="release it first"):
        engine.resume()


def test_refusals_are_worker_errors_as_the_ports_say():
    assert issubclass(EngineError, WorkerError)


def test_a_role_change_empties_the_cache_and_keeps_the_weights(make_engine, drive):
    engine = make_engine()
    prompt = prompt_of(5, 20)
    engine.add(request("a", prompt, affinity="t"))
    tokens = drive(engine)[0]["a"].tokens
    engine.set_role(Role.PREFILL)
    assert engine.role is Role.PREFILL
    assert engine.held_tokens(prompt, "t") == 0
    engine.add(request("b", prompt))
    blob = drive(engine)[1]["b"]
    engine.set_role(Role.DECODE)
    engine.add(request("b", prompt), kv=blob)
    assert drive(engine, streamed={"b": list(blob.tokens[20:])})[0]["b"].tokens == tokens
    with pytest.raises(EngineError, match="training"):
        engine.set_role(Role.TRAINING)


def test_counters_and_samples_say_what_ran(make_engine, drive):
    engine = make_engine(frozen_clock=True, pace=Pace(decode_fixed_s=1.0, decode_per_sequence_s=0.5))
    engine.add(request("a", prompt_of(1, 10), new=4))
    engine.add(request("b", prompt_of(2, 10), new=2))
    while engine.has_work:
        engine.step()
    samples = engine.take_samples()
    assert samples.decode == (DecodeSample(2, 1, 2.0), DecodeSample(1, 2, 3.0))
    assert samples.prefill == (PrefillSample(20, 0.0, 2),)
    assert (samples.prefill_tokens, samples.generated_tokens, samples.decode_iterations) == (20, 6, 3)
    assert (samples.running, samples.waiting, samples.kv_capacity_tokens) == (0, 0, 2000)
    again = engine.take_samples()
    assert (again.decode, again.prefill, again.generated_tokens) == ((), (), 6)


def test_an_iteration_lasts_as_long_as_the_pace_says_and_a_phase_change_costs_extra_when_colocated(make_engine):
    pace = Pace(decode_fixed_s=0.02, decode_per_sequence_s=0.001, prefill_per_token_s=0.0001, phase_switch_s=0.005)
    engine = make_engine(pace=pace, frozen_clock=True)
    engine.add(request("a", prompt_of(1, 10), new=3))
    prefill, decode, more = (engine.step() for _ in range(3))
    assert [prefill.phase, decode.phase, more.phase] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert prefill.paced_s == pytest.approx(0.001)
    assert decode.paced_s == pytest.approx(0.021 + 0.005)
    assert more.paced_s == pytest.approx(0.021)
    samples = engine.take_samples()
    assert samples.decode[0].duration_s == pytest.approx(2 * 0.021)
    result = more.finished["a"]
    assert result.prefill_s == pytest.approx(0.001)


def test_a_prefill_worker_pays_no_phase_change(make_engine):
    engine = make_engine("prefill", pace=Pace(prefill_per_token_s=0.001, phase_switch_s=1.0), frozen_clock=True)
    for rid in range(2):
        engine.add(request(rid, prompt_of(rid, 10)))
        assert engine.step().paced_s == pytest.approx(0.01)


def test_compute_that_takes_longer_than_the_pace_is_not_waited_for(make_engine):
    engine = make_engine(pace=Pace(prefill_per_token_s=1e-12))
    engine.add(request("a", prompt_of(1, 10)))
    output = engine.step()
    assert output.paced_s == 0.0
    assert output.compute_s > 0.0
    sample = engine.take_samples().prefill[0]
    assert 0.0 < sample.duration_s <= output.compute_s


def test_limits_below_one_and_contexts_beyond_the_model_are_refused(make_engine):
    with pytest.raises(ValueError, match="max_running = 0"):
        EngineLimits(max_running=0, kv_tokens=1, prefill_chunk_tokens=1, max_context_tokens=1)
    with pytest.raises(EngineError, match="256 positions"):
        make_engine(max_context_tokens=257)
    with pytest.raises(EngineError, match="64 positions"):
        make_engine(name="phi3-longrope", max_context_tokens=65)
    assert not make_engine(name="phi3-longrope", max_context_tokens=64).has_work
    with pytest.raises(EngineError, match="training"):
        make_engine("training")


def test_a_folder_without_a_model_is_named(tmp_path):
    from pearl_executor.engines.torch.engine import Engine

    limits = EngineLimits(max_running=1, kv_tokens=1, prefill_chunk_tokens=1, max_context_tokens=1)
    with pytest.raises(EngineError, match=r"no config\.json"):
        Engine(tmp_path, role=Role.COLOCATED, limits=limits)
