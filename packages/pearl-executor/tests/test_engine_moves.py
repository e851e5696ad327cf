"""A generation may be interrupted, resumed, moved and handed over anywhere: its tokens stay the same."""

import random
from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pearl_executor.engines.torch.blob import KvBlob  # noqa: E402
from pearl_executor.engines.torch.contract import RequestRefusedError  # noqa: E402
from pearl_executor.engines.torch.pool import KvLayout, KvPool, LayerShape  # noqa: E402
from pearl_executor.ports import Finish, GenerateRequest, Sampling, TransferError  # noqa: E402

pytestmark = pytest.mark.torch

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=11)
NEW = 24


def prompt_of(seed, size):
    draw = random.Random(seed)
    return [draw.randrange(1, 128) for _ in range(size)]


class Fleet:
    """Two colocated engines and a prefill-decode pair of one model, and a call that runs on any of them."""

    def __init__(self, make_engine, drive, name):
        self.engines = {
            "here": make_engine(name=name),
            "there": make_engine(name=name, prefill_chunk_tokens=5, max_running=2),
            "prefill": make_engine("prefill", name=name),
            "decode": make_engine("decode", name=name),
        }
        self.drive = drive
        self.calls = 0
        self.whole = cache(lambda prompt, sampling: self.call("there", list(prompt), NEW, sampling))

    def call(self, place, prompt, new, sampling, cut=None, affinity="", tail=False):
        """Run a call at `place` ("pair" is prefill-decode); interrupt it when `cut` tokens are there."""
        self.calls += 1
        rid = f"r{self.calls:06d}"
        request = GenerateRequest(rid=rid, prompt=prompt, max_new_tokens=new, sampling=sampling, affinity=affinity)
        if place != "pair":
            self.engines[place].add(request)
            return self.finish(self.engines[place], rid, cut)
        self.engines["prefill"].add(request)
        if cut == 0:
            return self.finish(self.engines["prefill"], rid, 0)
        results, exported = self.drive(self.engines["prefill"])
        if rid in results:
            return results[rid]
        blob = exported[rid]
        if tail:
            blob = blob.tail(self.engines["decode"].held_tokens(prompt, affinity))
        self.engines["decode"].add(request, kv=KvBlob.from_bytes(blob.to_bytes()))
        return self.finish(self.engines["decode"], rid, cut, have=1)

    def finish(self, engine, rid, cut, have=0):
        """Step until `cut` tokens are there, abort, and collect the result."""
        while cut is not None and have < cut:
            output = engine.step()
            have += len(output.chunks.get(rid, _Nothing).tokens)
            if rid in output.finished:
                return output.finished[rid]
        if cut is not None:
            engine.abort(rid)
        return self.drive(engine)[0][rid]


class _Nothing:
    tokens = ()


@pytest.fixture(scope="module")
def fleet(make_engine, drive):
    return cache(lambda name: Fleet(make_engine, drive, name))


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mistral-window"])
@settings(max_examples=20, deadline=None)
@given(
    cut=st.integers(0, NEW - 1),
    first=st.sampled_from(["here", "pair"]),
    second=st.sampled_from(["here", "there", "pair"]),
    sampling=st.sampled_from([GREEDY, SAMPLED]),
    affinity=st.sampled_from(["", "t1"]),
    prompt=st.integers(0, 3).map(lambda seed: prompt_of(seed, 10 + 17 * seed)),
)
def test_interrupted_at_any_token_and_resumed_in_any_mode_the_continuation_is_identical(
    fleet, name, cut, first, second, sampling, affinity, prompt
):
    runs = fleet(name)
    whole = runs.whole(tuple(prompt), sampling)
    part = runs.call(first, prompt, NEW, sampling, cut=cut, affinity=affinity)
    assert part.finish is Finish.INTERRUPTED
    assert part.tokens == whole.tokens[:cut]
    rest = runs.call(second, [*prompt, *part.tokens], NEW - cut, sampling, affinity=affinity)
    assert part.tokens + rest.tokens == whole.tokens
    assert part.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_many_interruptions_across_all_engines_still_give_the_whole(fleet, cuts, draw):
    runs = fleet("qwen3")
    prompt = prompt_of(9, 31)
    whole = runs.call("here", prompt, NEW, SAMPLED)
    tokens = ()
    for cut in cuts:
        place = draw.choice(["here", "there", "pair"])
        remaining = NEW - len(tokens)
        if cut < remaining:
            tokens += runs.call(place, [*prompt, *tokens], remaining, SAMPLED, cut=cut, affinity="t").tokens
    tokens += runs.call("pair", [*prompt, *tokens], NEW - len(tokens), SAMPLED).tokens
    assert tokens == whole.tokens


def test_a_pair_gives_the_tokens_of_a_colocated_engine_over_several_turns_and_moves_only_what_is_missing(fleet):
    runs = fleet("llama")
    context = prompt_of(3, 30)
    for turn in range(3):
        together = runs.call("here", context, 9, GREEDY, affinity="a")
        held = runs.engines["decode"].held_tokens(context, "b")
        apart = runs.call("pair", context, 9, GREEDY, affinity="b", tail=True)
        assert apart.tokens == together.tokens
        if turn:
            # The decode worker holds prompt and response of the last turn, the prefill worker its prompt.
            assert held == len(context) - 5 - 1
            assert apart.cached_tokens == len(context) - 5 - 9
        context = [*context, *apart.tokens, *prompt_of(50 + turn, 5)]


def test_the_first_token_may_end_the_response_on_the_prefill_worker(fleet):
    runs = fleet("qwen3")
    prompt = prompt_of(4, 12)
    only = runs.call("pair", prompt, 1, GREEDY)
    assert only.finish is Finish.LENGTH
    stop = replace(GREEDY, stop_token_ids=(only.tokens[0],))
    assert runs.call("pair", prompt, 10, stop).finish is Finish.STOP


def exported_blob(fleet, prompt, affinity=""):
    engine = fleet("qwen3").engines["prefill"]
    request = GenerateRequest(rid="blob", prompt=prompt, max_new_tokens=8, sampling=GREEDY, affinity=affinity)
    engine.add(request)
    return request, fleet("qwen3").drive(engine)[1]["blob"]


@cache
def _blob_bytes(fleet):
    return exported_blob(fleet, prompt_of(5, 20))[1].to_bytes()


def test_a_blob_describes_itself_and_comes_back_from_bytes_as_it_was(fleet):
    _, blob = exported_blob(fleet, prompt_of(5, 20))
    back = KvBlob.from_bytes(blob.to_bytes())
    assert replace(back, keys=(), values=()) == replace(blob, keys=(), values=())
    for one, other in zip((*back.keys, *back.values), (*blob.keys, *blob.values), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (back.dtype, back.version, back.kv_tokens) == ("float32", 0, 20)
    assert back.nbytes == 20 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("start", [0, 1, 7, 19, 20, 100])
def test_the_tail_of_a_blob_leaves_out_what_the_receiver_holds_but_never_all(fleet, start):
    _, blob = exported_blob(fleet, prompt_of(5, 20))
    tail = blob.tail(start)
    assert tail.start == min(start, 19)
    assert tail.kv_tokens == len(tail.keys[0]) == 20 - tail.start
    np.testing.assert_array_equal(tail.values[1], blob.values[1][tail.start :])
    assert tail.tail(0) is tail


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_bytes_are_refused_wherever_the_damage_is(fleet, at, flip):
    whole = _blob_bytes(fleet)
    at %= len(whole)
    damaged = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :] if flip else whole[:at]
    with pytest.raises(TransferError, match="not readable"):
        KvBlob.from_bytes(damaged)


def test_kv_of_another_prompt_model_type_or_newer_weights_is_refused_and_the_engine_works_on(fleet, make_engine):
    request, blob = exported_blob(fleet, prompt_of(6, 15))
    decode = fleet("qwen3").engines["decode"]
    wrong = {
        "another prompt": (replace(request, prompt=prompt_of(7, 15)), blob),
        "newer than the engine's": (request, replace(blob, version=3)),
        "float16": (request, replace(blob, dtype="float16")),
        "layers": (request, replace(blob, keys=blob.keys[:1], values=blob.values[:1])),
        "finished": (replace(request, max_new_tokens=1), blob),
        "no generated token": (request, replace(blob, logprobs=())),
        "send it whole": (request, blob.tail(4)),
    }
    for named, (asked, kv) in wrong.items():
        with pytest.raises(TransferError, match=named):
            decode.add(asked, kv=kv)
    with pytest.raises(TransferError, match="layers"):
        make_engine("decode", name="gpt2").add(request, kv=blob)
    decode.add(request, kv=blob)
    assert fleet("qwen3").drive(decode)[0]["blob"].finish is Finish.LENGTH


def test_each_role_refuses_what_the_other_must_do(fleet):
    request, blob = exported_blob(fleet, prompt_of(6, 15))
    with pytest.raises(RequestRefusedError, match="prefill it elsewhere"):
        fleet("qwen3").engines["decode"].add(request)
    with pytest.raises(RequestRefusedError, match="decode worker"):
        fleet("qwen3").engines["prefill"].add(request, kv=blob)


def test_a_colocated_engine_continues_a_hand_over_too(fleet):
    runs = fleet("qwen3")
    request, blob = exported_blob(fleet, prompt_of(6, 15))
    runs.engines["here"].add(request, kv=blob)
    moved = runs.drive(runs.engines["here"])[0]["blob"]
    assert moved.tokens == runs.call("there", request.prompt, 8, GREEDY).tokens


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type_of_kv_survives_the_way_through_bytes_bit_by_bit(dtype):
    layout = KvLayout((LayerShape(2, 4, 3), LayerShape(1, 2, 2)), getattr(torch, dtype))
    source, target = (KvPool(layout, 10, 1, 8, torch.device("cpu")) for _ in range(2))
    slots = source.take(6)
    for pool in (*source.keys, *source.values):
        pool[slots] = torch.randn(6, *pool.shape[1:]).to(layout.dtype)
    keys, values = source.read(slots)
    blob = KvBlob(
        rid="r", version=1, tokens=tuple(range(7)), logprobs=(0.0,), spans=(), dtype=dtype, keys=keys, values=values
    )
    back = KvBlob.from_bytes(blob.to_bytes())
    elsewhere = target.take(9)[3:]
    target.write(elsewhere, back.keys, back.values)
    for one, other in zip((*source.keys, *source.values), (*target.keys, *target.values), strict=True):
        assert torch.equal(one[slots], other[elsewhere])
