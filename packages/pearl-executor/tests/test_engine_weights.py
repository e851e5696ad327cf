"""Weights: loaded whole or not at all, named by their version in every token, never mixed through the prefix cache."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from pearl_executor.engines.torch.blob import KvBlob  # noqa: E402
from pearl_executor.engines.torch.contract import EngineError, WeightsRefusedError  # noqa: E402
from pearl_executor.engines.torch.weights import weights_checksum  # noqa: E402
from pearl_executor.ports import GenerateRequest, Sampling, TransferError  # noqa: E402
from pearl_state.trajectory import WeightSpan  # noqa: E402

pytestmark = pytest.mark.torch

GREEDY = Sampling(temperature=0.0)


def prompt_of(seed, size):
    draw = random.Random(seed)
    return [draw.randrange(1, 128) for _ in range(size)]


def request(rid, prompt, new=10, affinity=""):
    return GenerateRequest(rid=str(rid), prompt=prompt, max_new_tokens=new, sampling=GREEDY, affinity=affinity)


def tokens_of(engine, drive, prompt, affinity=""):
    engine.add(request("probe", prompt, affinity=affinity))
    return drive(engine)[0]["probe"].tokens


@pytest.fixture(scope="session")
def snapshot(model_dir):
    """Weights of seed 1 for the same architecture, and their checksum."""
    path = model_dir("qwen3", 1)
    return path, weights_checksum(load_file(path / "model.safetensors"))


def test_after_loading_the_engine_is_the_one_built_from_those_weights(make_engine, drive, snapshot):
    engine, other = make_engine(), make_engine(seed=1)
    path, checksum = snapshot
    assert engine.load_weights(path, 7, checksum) == 7
    assert engine.weight_version == 7
    for seed in range(3):
        prompt = prompt_of(seed, 20)
        assert tokens_of(engine, drive, prompt) == tokens_of(other, drive, prompt)


@settings(max_examples=15, deadline=None)
@given(loads=st.lists(st.integers(1, 6), min_size=1, max_size=4), seeds=st.integers(0, 2))
def test_a_load_midway_keeps_the_request_running_and_stamps_every_token(make_engine, drive, snapshot, loads, seeds):
    engine = make_engine()
    new = 30
    engine.add(request("r", prompt_of(seeds, 20), new=new))
    streamed, expected, version = {"r": []}, [], 0
    for pause in loads:
        for _ in range(pause):
            for chunk in engine.step().chunks.values():
                assert chunk.version == version
                streamed["r"] += chunk.tokens
                expected.append(version)
        version += 1
        engine.load_weights(snapshot[0], version)
    result = drive(engine, streamed=streamed)[0]["r"]
    expected += [version] * (new - len(expected))
    spans = tuple(WeightSpan(v, expected.count(v)) for v in sorted(set(expected)))
    assert result.spans == spans
    assert len(result.tokens) == new


def test_a_prefix_of_old_weights_is_never_reused_for_a_new_request(make_engine, drive, snapshot):
    """miles#2782, #2783, NeMo-RL#4018: a prefix cache that outlives a refit serves KV of old weights."""
    engine, fresh = make_engine(), make_engine(seed=1)
    context = prompt_of(4, 30)
    engine.add(request("old", context, affinity="t"))
    drive(engine)
    assert engine.held_tokens(context, "t") > 0
    engine.load_weights(snapshot[0], 57)
    assert engine.held_tokens(context, "t") == 0
    engine.add(request("new", context, affinity="t"))
    result = drive(engine)[0]["new"]
    assert result.cached_tokens == 0
    assert result.tokens == tokens_of(fresh, drive, context)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_request_that_a_load_overtook_leaves_no_prefix_behind(make_engine, drive, snapshot, steps):
    engine, fresh = make_engine(prefill_chunk_tokens=20), make_engine(seed=1)
    context = prompt_of(5, 50)
    engine.add(request("across", context, affinity="t"))
    streamed = {}
    for _ in range(steps):
        for rid, chunk in engine.step().chunks.items():
            streamed.setdefault(rid, []).extend(chunk.tokens)
    engine.load_weights(snapshot[0], 1)
    drive(engine, streamed=streamed)
    assert engine.held_tokens(context, "t") == 0
    assert engine.take_samples().kv_used_tokens == 0
    assert tokens_of(engine, drive, context, affinity="t") == tokens_of(fresh, drive, context)


def test_kv_handed_over_across_a_load_serves_its_request_but_no_other(make_engine, drive, snapshot):
    prefill, decode = make_engine("prefill"), make_engine("decode")
    context = prompt_of(6, 20)
    asked = request("r", context, affinity="t")
    prefill.add(asked)
    blob = drive(prefill)[1]["r"]
    decode.load_weights(snapshot[0], 1)
    decode.add(asked, kv=KvBlob.from_bytes(blob.to_bytes()))
    result = drive(decode, streamed={"r": list(blob.tokens[20:])})[0]["r"]
    assert result.spans == (WeightSpan(0, 1), WeightSpan(1, 9))
    assert decode.held_tokens(context, "t") == 0
    with pytest.raises(TransferError, match="send it whole"):
        decode.add(asked, kv=blob.tail(5))


def test_kv_of_old_weights_is_not_mixed_with_a_kept_prefix_of_new_ones(make_engine, drive, snapshot):
    prefill, other = make_engine("prefill"), make_engine("prefill", seed=1, weight_version=1)
    keeping, empty = make_engine("decode"), make_engine("decode")
    asked = request("r", prompt_of(6, 20), affinity="t")
    prefill.add(asked)
    old = drive(prefill)[1]["r"]
    other.add(asked)
    new = drive(other)[1]["r"]
    for engine in (keeping, empty):
        engine.load_weights(snapshot[0], 1)
    keeping.add(asked, kv=new)
    drive(keeping, streamed={"r": list(new.tokens[20:])})
    held = keeping.held_tokens(asked.prompt, "t")
    tokens = []
    for engine in (keeping, empty):
        engine.add(asked, kv=old)
        tokens.append(drive(engine, streamed={"r": list(old.tokens[20:])})[0]["r"].logprobs)
    assert tokens[0] == tokens[1]
    assert keeping.held_tokens(asked.prompt, "t") == held == 20


def test_kv_that_a_load_overtook_on_the_prefill_worker_says_so(make_engine, drive, snapshot):
    prefill, decode = make_engine("prefill", prefill_chunk_tokens=10), make_engine("decode")
    asked = request("r", prompt_of(6, 25), affinity="t")
    prefill.add(asked)
    prefill.step()
    prefill.load_weights(snapshot[0], 1)
    blob = drive(prefill)[1]["r"]
    assert (blob.mixed, blob.version) == (True, 1)
    decode.load_weights(snapshot[0], 1)
    decode.add(asked, kv=blob)
    drive(decode, streamed={"r": list(blob.tokens[25:])})
    assert decode.held_tokens(asked.prompt, "t") == 0


def broken_snapshots(folder, good):
    """Each way in which a snapshot may not fit."""
    name = next(name for name in good if "q_proj" in name)
    cases = {
        "missing": {k: v for k, v in good.items() if k != name},
        "unknown": good | {"extra": torch.zeros(1)},
        "needed": good | {name: torch.zeros(3, 3)},
        "not finite": good | {name: torch.full_like(good[name], float("nan"))},
    }
    for case, tensors in cases.items():
        path = folder / f"{case}.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, path)
        yield case, path, None
    cut = folder / "cut.safetensors"
    cut.write_bytes((folder / "missing.safetensors").read_bytes()[:500])
    yield "not readable", cut, None
    yield "no weights at", folder / "nowhere", None


def test_a_snapshot_that_does_not_fit_is_refused_and_the_old_weights_stay(make_engine, drive, snapshot, tmp_path):
    engine = make_engine()
    prompt = prompt_of(7, 20)
    before = tokens_of(engine, drive, prompt, affinity="t")
    good = load_file(snapshot[0] / "model.safetensors")
    cases = list(broken_snapshots(tmp_path, good))
    cases.append(("checksum", snapshot[0], "0" * 32))
    for named, path, checksum in cases:
        with pytest.raises(WeightsRefusedError, match=named):
            engine.load_weights(path, 5, checksum)
        assert engine.weight_version == 0
    assert engine.held_tokens(prompt, "t") > 0
    assert tokens_of(engine, drive, prompt) == before


def test_a_version_that_goes_back_is_refused_and_the_same_one_may_be_loaded_again(make_engine, snapshot):
    engine = make_engine()
    path, checksum = snapshot
    engine.load_weights(path, 4, checksum)
    with pytest.raises(WeightsRefusedError, match="version 3 is older than the loaded 4"):
        engine.load_weights(path, 3, checksum)
    assert engine.load_weights(path, 4, checksum) == 4


def test_an_engine_whose_weights_have_no_version_takes_no_request(make_engine, drive, snapshot):
    engine = make_engine(weight_version=None)
    assert engine.weight_version is None
    with pytest.raises(EngineError, match="load_weights first"):
        engine.add(request("r", [1, 2, 3]))
    engine.load_weights(snapshot[0], 0)
    assert len(tokens_of(engine, drive, [1, 2, 3])) == 10


def test_weights_do_not_depend_on_their_file_after_loading(make_engine, drive, model_dir, tmp_path):
    from pearl_executor.engines.torch.engine import Engine, EngineLimits
    from pearl_state.roles import Role

    source = model_dir("qwen3", 2)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    limits = EngineLimits(max_running=2, kv_tokens=200, prefill_chunk_tokens=50, max_context_tokens=100)
    engine = Engine(tmp_path, role=Role.COLOCATED, limits=limits, weight_version=0)
    before = tokens_of(engine, drive, [1, 2, 3])
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    assert tokens_of(engine, drive, [1, 2, 3]) == before


def test_without_weights_in_the_folder_they_are_random_by_the_seed_and_nothing_else(model_dir, drive, tmp_path):
    from pearl_executor.engines.torch.engine import Engine, EngineLimits
    from pearl_state.roles import Role

    (tmp_path / "config.json").write_bytes((model_dir() / "config.json").read_bytes())
    limits = EngineLimits(max_running=2, kv_tokens=200, prefill_chunk_tokens=50, max_context_tokens=100)
    state = torch.random.get_rng_state()
    built = [Engine(tmp_path, role=Role.COLOCATED, limits=limits, weight_version=0, seed=s) for s in (1, 1, 2)]
    assert torch.equal(state, torch.random.get_rng_state())
    one, same, other = (tokens_of(engine, drive, [5, 6, 7]) for engine in built)
    assert one == same != other


def test_the_checksum_knows_names_types_shapes_and_values_but_not_order_or_layout():
    base = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    digest = weights_checksum(base)
    assert weights_checksum(dict(reversed(base.items()))) == digest
    assert weights_checksum(base | {"a": torch.arange(6.0).view(2, 3).t().contiguous().t()}) == digest
    changed = [
        {"a": base["a"], "c": base["b"]},
        base | {"b": torch.ones(2, dtype=torch.float64)},
        base | {"a": base["a"].view(3, 2)},
        base | {"b": torch.tensor([1.0, 1.0 + 1e-7])},
        base | {"c": torch.zeros(0)},
    ]
    assert len({digest, *map(weights_checksum, changed)}) == 1 + len(changed)
    assert weights_checksum({"h": torch.ones(3, dtype=torch.bfloat16)})
