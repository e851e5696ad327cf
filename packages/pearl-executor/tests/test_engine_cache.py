"""KV memory: prefixes are reused across turns, the budget is never exceeded, and nobody loses tokens over it."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pearl_executor.engines.torch.contract import EngineLimits, Phase, RequestRefusedError  # noqa: E402
from pearl_executor.engines.torch.pool import KvLayout, KvPool, LayerShape  # noqa: E402
from pearl_executor.engines.torch.prefix import PrefixCache  # noqa: E402
from pearl_executor.engines.torch.scheduler import Scheduler  # noqa: E402
from pearl_executor.engines.torch.sequence import Sequence  # noqa: E402
from pearl_executor.ports import Finish, GenerateRequest, Sampling  # noqa: E402

pytestmark = pytest.mark.torch

GREEDY = Sampling(temperature=0.0)


def prompt_of(seed, size):
    draw = random.Random(seed)
    return [draw.randrange(1, 128) for _ in range(size)]


def request(rid, prompt, new=8, affinity="", sampling=GREEDY):
    return GenerateRequest(rid=str(rid), prompt=prompt, max_new_tokens=new, sampling=sampling, affinity=affinity)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mistral-window"])
def test_turns_of_a_trajectory_reuse_their_prefix_and_give_the_same_tokens(name, make_engine, drive):
    keeping, forgetful = make_engine(name=name), make_engine(name=name)
    context = prompt_of(1, 25)
    for turn in range(4):
        keeping.add(request(turn, context, affinity="t1"))
        forgetful.add(request(turn, context))
        kept, fresh = drive(keeping)[0][str(turn)], drive(forgetful)[0][str(turn)]
        assert kept.tokens == fresh.tokens
        assert kept.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
        assert fresh.cached_tokens == 0
        # Of the last turn, all but its last token (which was never computed) is there.
        assert kept.cached_tokens == (len(context) - 6 - 1 if turn else 0)
        context = [*context, *kept.tokens, *prompt_of(40 + turn, 6)]
    assert keeping.take_samples().cached_tokens > 0


def test_a_rewritten_context_reuses_only_the_part_that_is_equal(make_engine, drive):
    engine, fresh = make_engine(), make_engine()
    old = prompt_of(2, 40)
    engine.add(request("old", old, affinity="t"))
    drive(engine)
    new = [*old[:17], (old[17] + 1) % 127 + 1, *prompt_of(3, 12)]
    engine.add(request("new", new, affinity="t"))
    fresh.add(request("new", new))
    result = drive(engine)[0]["new"]
    assert result.cached_tokens == (17 if new[17] != old[17] else 18)
    assert result.tokens == drive(fresh)[0]["new"].tokens


def test_a_prompt_that_is_kept_whole_still_computes_its_last_token(make_engine, drive):
    engine = make_engine()
    prompt = prompt_of(4, 20)
    engine.add(request("a", prompt, new=5, affinity="t"))
    first = drive(engine)[0]["a"]
    engine.add(request("b", prompt, new=5, affinity="t"))
    again = drive(engine)[0]["b"]
    assert again.cached_tokens == 19
    assert again.tokens == first.tokens


def test_trajectories_do_not_share_prefixes_and_requests_without_affinity_keep_none(make_engine, drive):
    engine = make_engine()
    prompt = prompt_of(5, 20)
    for rid, affinity in (("a", "t1"), ("b", "t2"), ("c", "")):
        engine.add(request(rid, prompt, affinity=affinity))
        assert drive(engine)[0][rid].cached_tokens == 0
    assert engine.take_samples().kv_used_tokens == 2 * (20 + 8 - 1)


def test_the_least_recently_used_prefix_is_evicted_first_and_from_its_end(make_engine, drive):
    engine = make_engine(kv_tokens=100, max_context_tokens=100)
    contexts = {name: prompt_of(seed, 24) for seed, name in enumerate("abc")}
    for name, context in contexts.items():
        engine.add(request(name, context, new=7, affinity=name))
        drive(engine)
    # Using "a" again makes "b" the oldest, and leaves 24 + 30 + 30 tokens kept. A stranger of 60 needs 44 of them.
    engine.add(request("a2", contexts["a"], new=1, affinity="a"))
    drive(engine)
    engine.add(request("x", prompt_of(9, 60), new=1))
    drive(engine)
    assert engine.held_tokens(contexts["a"], "a") == 24
    assert engine.held_tokens(contexts["b"], "b") == 0
    assert engine.held_tokens(contexts["c"], "c") == 16


def test_a_request_larger_than_the_whole_budget_is_refused_with_the_numbers(make_engine):
    engine = make_engine(kv_tokens=50)
    with pytest.raises(RequestRefusedError, match=r"40 prompt \+ 11 new tokens exceed 50 \(kv_tokens = 50"):
        engine.add(request("big", prompt_of(1, 40), new=11))
    engine.add(request("fits", prompt_of(1, 40), new=10))


def test_a_request_waits_until_its_kv_fits_and_others_keep_their_order(make_engine, drive):
    engine = make_engine(kv_tokens=100, max_context_tokens=100)
    for rid in range(3):
        engine.add(request(rid, prompt_of(rid, 40), new=20))
    engine.step()
    samples = engine.take_samples()
    assert (samples.running + samples.waiting, samples.kv_used_tokens) == (3, 40)
    results, _ = drive(engine)
    assert sorted(results) == ["0", "1", "2"]
    assert results["0"].queue_s < results["1"].queue_s < results["2"].queue_s


def test_requests_that_outgrow_the_budget_take_turns_and_lose_nothing(make_engine, drive):
    tight = make_engine(kv_tokens=120, max_context_tokens=120)
    roomy = make_engine()
    sampled = Sampling(temperature=1.0, seed=2)
    for rid in range(3):
        for engine in (tight, roomy):
            engine.add(request(rid, prompt_of(rid, 6), new=90, sampling=sampled))
    crowded, calm = drive(tight)[0], drive(roomy)[0]
    assert tight._scheduler.retractions > 0
    assert {rid: result.tokens for rid, result in crowded.items()} == {rid: r.tokens for rid, r in calm.items()}
    assert tight.take_samples().prefill_tokens == 18


@settings(max_examples=25, deadline=None)
@given(
    kv_tokens=st.integers(60, 140),
    max_running=st.integers(1, 5),
    chunk=st.integers(1, 40),
    calls=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 30), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_under_any_load_the_budget_holds_everything_ends_and_tokens_are_those_of_a_roomy_engine(
    engines, drive, kv_tokens, max_running, chunk, calls
):
    tight, roomy = engines
    tight.resize(kv_tokens, max_running, chunk)
    streamed, results, aborted = {}, {}, set()
    for rid, (trajectory, size, new, steps, gives_up) in enumerate(calls):
        tight.engine.add(request(rid, prompt_of(trajectory, size), new=new, affinity=f"t{trajectory}"))
        if gives_up:
            tight.engine.abort(str(rid))
            aborted.add(str(rid))
        for _ in range(steps):
            output = tight.engine.step()
            tight.check()
            results |= output.finished
            for key, chunk_ in output.chunks.items():
                streamed.setdefault(key, []).extend(chunk_.tokens)
    results |= drive(tight.engine, streamed=streamed)[0]
    tight.check()
    assert sorted(results) == sorted(map(str, range(len(calls))))
    for rid, (trajectory, size, new, _, _) in enumerate(calls):
        if str(rid) in aborted:
            assert results[str(rid)].finish is Finish.INTERRUPTED
            continue
        roomy.add(request(rid, prompt_of(trajectory, size), new=new))
        assert results[str(rid)].tokens == drive(roomy)[0][str(rid)].tokens


class Tight:
    """An engine whose limits change between examples, and the law of its slots."""

    def __init__(self, engine):
        self.engine = engine

    def resize(self, kv_tokens, max_running, chunk):
        limits = EngineLimits(
            max_running=max_running, kv_tokens=kv_tokens, prefill_chunk_tokens=chunk, max_context_tokens=60
        )
        pool = KvPool(self.engine._pool.layout, kv_tokens, max_running, 60, torch.device("cpu"))
        self.engine._limits, self.engine._pool = limits, pool
        self.engine._scheduler = Scheduler(pool, limits)

    def check(self):
        """Each slot has exactly one owner, or is free; kept prefixes are counted right."""
        scheduler, pool = self.engine._scheduler, self.engine._pool
        live = [slot for sequence in scheduler.requests() for slot in sequence.slots if sequence.row >= 0]
        kept = [slot for entry in scheduler.prefix._entries.values() for slot in entry.slots]
        assert sorted(live + kept + pool._free_slots) == list(range(1, pool.capacity + 1))
        assert scheduler.prefix.tokens == len(kept)
        assert len(scheduler.running) + len(scheduler.prefilling) <= self.engine._limits.max_running


@pytest.fixture(scope="module")
def engines(make_engine):
    return Tight(make_engine()), make_engine()


def small_pool(tokens):
    return KvPool(KvLayout((LayerShape(1, 1, 1),), torch.float32), tokens, 2, tokens, torch.device("cpu"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=8)), max_size=20))
def test_the_prefix_cache_gives_back_the_longest_common_prefix_of_what_was_last_kept(steps):
    pool = small_pool(400)
    cache = PrefixCache(pool)
    kept = {}
    for affinity, tokens in steps:
        old = kept.pop(affinity, [])
        common = next(
            (i for i, (x, y) in enumerate(zip(old, tokens, strict=False)) if x != y), min(len(old), len(tokens))
        )
        assert cache.match(affinity, tokens) == common
        slots = cache.take(affinity, tokens)
        assert len(slots) == common
        slots = slots + pool.take(len(tokens) - len(slots))
        cache.keep(affinity, tokens, slots)
        if tokens:
            kept[affinity] = tokens
        assert cache.tokens == pool.used == sum(map(len, kept.values()))
    cache.clear()
    assert pool.free == 400


def test_padding_never_reads_what_other_requests_left_in_their_slots(make_engine, drive):
    engine, clean = make_engine(), make_engine()
    for rid in range(3):
        engine.add(request(rid, prompt_of(rid, 70)))
    drive(engine)
    # Every slot is free now, and rows of the slot table were used by longer requests.
    for pool in (*engine._pool.keys, *engine._pool.values):
        pool[1:] = float("nan")
    for rid, size in enumerate((3, 40, 17)):
        for each in (engine, clean):
            each.add(request(rid, prompt_of(rid, size)))
    assert {r: x.tokens for r, x in drive(engine)[0].items()} == {r: x.tokens for r, x in drive(clean)[0].items()}


def test_several_prompts_share_a_prefill_iteration_and_a_long_one_takes_several(make_engine):
    engine = make_engine(prefill_chunk_tokens=24)
    for rid, size in enumerate((5, 6, 40)):
        engine.add(request(rid, prompt_of(rid, size)))
    sizes, phases = [], []
    while not phases or phases[-1] is Phase.PREFILL:
        phases.append(engine.step().phase)
        sizes += [(sample.tokens, sample.requests) for sample in engine.take_samples().prefill]
    assert sizes == [(24, 3), (24, 1), (3, 1)]


def test_a_sequence_without_its_own_seed_draws_by_its_id():
    one, same, other = (Sequence.of(request(rid, [1, 2]), 3, 0.0) for rid in ("a", "a", "b"))
    assert one.next_uniform() == same.next_uniform() != other.next_uniform()
