"""The simulated engine: exact times, tokens conserved, KV within its budget, and no request forgotten."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pearl_planner.catalog import find_gpu, find_model
from pearl_rl.rollout.statistics import PrefixUse
from pearl_rl.simulation.engine import Engine
from pearl_rl.simulation.kernels import WorkerCosts
from pearl_rl.simulation.kv import KvPool
from pearl_rl.simulation.meter import EngineMeter
from pearl_rl.simulation.requests import EngineRequest, Outcome, SimulatedEngineLimits, Stage
from pearl_state.roles import Role

COSTS = WorkerCosts(find_model("qwen3-8b"), find_gpu("h800"), 2)


def engine(role=Role.COLOCATED, **limits) -> Engine:
    return Engine(COSTS, SimulatedEngineLimits(**{"kv_tokens": 100_000, **limits}), role)


def request(number=0, prompt=1000, new=50, **fields) -> EngineRequest:
    return EngineRequest(rid=f"r{number}", prompt_tokens=prompt, new_tokens=new, conversation=f"c{number}", **fields)


def run_out(e: Engine, most: int = 100_000) -> list[tuple[float, Outcome, EngineRequest]]:
    """Advance until nothing happens any more."""
    seen = []
    for _ in range(most):
        at_s = e.wake_s
        if at_s is None:
            return seen
        seen += [(at_s, outcome, r) for outcome, r in e.advance()]
    raise AssertionError("the engine never comes to rest")


def times(seen, outcome):
    return {r.rid: at_s for at_s, o, r in seen if o is outcome}


def test_a_request_alone_takes_the_sum_of_its_iterations() -> None:
    e = engine()
    e.submit(request(prompt=12_000, new=300), 5.0)
    seen = run_out(e)
    prefill = COSTS.prefill_s([(8192, 0)], 0) + COSTS.prefill_s([(12_000 - 8192, 8192)], 1)
    decode = sum(COSTS.decode_curve(1).iteration_s(12_001 + i) for i in range(299))
    assert times(seen, Outcome.PREFILLED)["r0"] == pytest.approx(5.0 + prefill)
    assert times(seen, Outcome.FINISHED)["r0"] == pytest.approx(5.0 + prefill + decode)
    assert e.idle
    assert e.meter.generated_tokens == 300
    assert e.meter.prefill_tokens == 12_000


def test_a_long_prompt_on_one_attention_rank_leaves_the_others_to_whoever_comes() -> None:
    """Four ranks of 2,048 tokens an iteration: a prompt of 20,000 takes ten, one of 100 the next one."""
    e = engine(prompt_chunk_tokens=2048)
    e.submit(request(0, prompt=20_000, new=1), 0.0)
    e.submit(request(1, prompt=100, new=1), 0.01)
    first_s = COSTS.prefill_s([(2048, 0)], 0)
    done = times(run_out(e), Outcome.PREFILLED)
    assert done["r1"] == pytest.approx(first_s + COSTS.prefill_s([(2048, 2048), (100, 0)], 1))
    assert done["r0"] > done["r1"]


def test_the_next_turn_computes_only_what_is_new() -> None:
    e = engine()
    e.submit(request(prompt=5000, new=100), 0.0)
    run_out(e)
    again = request(prompt=5000 + 100 + 700, new=10)
    e.submit(again, 100.0)
    run_out(e)
    # The last token generated has no KV yet.
    assert again.cached_tokens == 5099
    assert e.meter.prefill_tokens == 5000 + 701


def test_a_template_that_rewrites_responses_reuses_the_prompt_only() -> None:
    e = engine()
    e.submit(request(prompt=5000, new=100), 0.0)
    run_out(e)
    again = request(prompt=5800, new=10, reusable=5000)
    e.submit(again, 100.0)
    assert again.cached_tokens == 5000


def test_prompts_wait_for_no_decode_and_decode_waits_for_them() -> None:
    e = engine()
    e.submit(request(0, prompt=1000, new=500), 0.0)
    e.advance()
    before_s = e.wake_s
    e.submit(request(1, prompt=4000, new=2), 1.0)
    assert e.wake_s < before_s, "the run is cut at the next boundary"
    assert e.wake_s - 1.0 < 0.01
    seen = run_out(e)
    alone = engine()
    alone.submit(request(0, prompt=1000, new=500), 0.0)
    delay = times(seen, Outcome.FINISHED)["r0"] - times(run_out(alone), Outcome.FINISHED)["r0"]
    assert delay == pytest.approx(COSTS.prefill_s([(4000, 0)], 1), rel=0.2)


def test_mixing_delays_decode_less() -> None:
    def finish(mixed):
        e = engine(mixed=mixed)
        e.submit(request(0, prompt=1000, new=500), 0.0)
        e.advance()
        for i in range(8):
            e.submit(request(1 + i, prompt=6000, new=2), 0.5 + 0.05 * i)
        return times(run_out(e), Outcome.FINISHED)["r0"]

    assert finish(mixed=True) < finish(mixed=False)


def test_cutting_a_run_anywhere_does_not_change_when_it_ends() -> None:
    plain, poked = engine(), engine()
    for e in (plain, poked):
        e.submit(request(prompt=3000, new=400), 0.0)
        e.advance()
    for i in range(20):
        # An abort of a request that came and went settles what ran meanwhile.
        visitor = request(1 + i, prompt=10)
        at_s = 0.1 + 0.05 * i
        poked.submit(visitor, at_s)
        poked.abort(visitor, at_s)
    assert times(run_out(poked), Outcome.FINISHED)["r0"] == pytest.approx(
        times(run_out(plain), Outcome.FINISHED)["r0"], rel=1e-9
    )


def test_a_batch_that_outgrows_its_memory_gives_one_back_and_still_finishes_all() -> None:
    e = engine(kv_tokens=4000, reserve_tokens=0)
    for i in range(4):
        e.submit(request(i, prompt=900, new=800), 0.0)
    seen = run_out(e)
    assert e.meter.retractions > 0
    assert set(times(seen, Outcome.FINISHED)) == {"r0", "r1", "r2", "r3"}
    assert e.meter.generated_tokens == 4 * 800


def test_reserving_room_for_growth_avoids_retraction() -> None:
    e = engine(kv_tokens=4000, reserve_tokens=800)
    for i in range(4):
        e.submit(request(i, prompt=900, new=800), 0.0)
    run_out(e)
    assert e.meter.retractions == 0


def test_the_oldest_prefix_gives_way_first() -> None:
    e = engine(kv_tokens=10_000)
    for i in range(3):
        e.submit(request(i, prompt=4000, new=1), float(i))
        run_out(e)
    assert [e.kv.match(f"c{i}", "", 4001, 9999) for i in range(3)] == [2000, 4000, 4000]


def test_a_root_is_held_once_however_many_begin_with_it() -> None:
    e = engine(kv_tokens=20_000)
    for i in range(4):
        e.submit(request(i, prompt=5000, new=10, root="task", root_tokens=4000), 0.0)
        run_out(e)
    assert e.kv.used == 4000 + 4 * (1000 + 9)
    assert e.meter.prefill_tokens == 5000 + 3 * 1000


def test_a_path_that_a_conversation_left_stays_until_its_turn_to_give_way_comes() -> None:
    e = engine(kv_tokens=10_000, keeps_left_paths=True)
    e.submit(request(0, prompt=4000, new=1), 0.0)
    run_out(e)
    # The history was edited after 1,500 tokens: the rest of the old path is of use to nobody.
    e.submit(request(0, prompt=3000, new=1, reusable=1500), 1.0)
    run_out(e)
    assert e.kv.used == e.kv.kept == 1500 + 2500 + 1500
    e.submit(request(1, prompt=5500, new=1), 2.0)
    run_out(e)
    assert e.kv.match("c0", "", 9999, 9999) == 3000, "the older rest gave way first"
    assert e.kv.used == 1500 + 3000 + 5500
    e.submit(request(2, prompt=3000, new=1), 3.0)
    run_out(e)
    assert e.kv.match("c0", "", 9999, 9999) == 1500
    assert e.kv.used == 10_000


def test_a_decode_engine_without_a_prefix_cache_needs_each_prompt_whole() -> None:
    for cached, found in ((True, 3000), (False, 0)):
        e = engine(Role.DECODE, decode_prefix_cache=cached)
        for number in range(2):
            turn = request(prompt=3000 + 500 * number, new=1, root="task", root_tokens=1000)
            assert e.reserve(turn, float(number))
            assert turn.cached_tokens == found * number
            e.join(turn, number + 0.5)
        assert e.kv.used == (3500 if cached else 0)


def test_newer_weights_void_what_was_kept_and_pause_what_runs() -> None:
    e = engine()
    e.submit(request(0, prompt=2000, new=10), 0.0)
    run_out(e)
    e.submit(request(1, prompt=2000, new=300), 10.0)
    e.advance()
    due_s = e.wake_s
    e.weights_changed(10.5, 2.0)
    assert e.wake_s == pytest.approx(due_s + 2.0)
    run_out(e)
    for i in range(2):
        assert e.kv.match(f"c{i}", "", 5000, 5000) == 0, "what older weights computed is not found again"
    assert e.kv.used == 0


def test_an_interruption_returns_what_was_generated_by_then() -> None:
    e = engine()
    e.submit(request(0, prompt=1000, new=500), 0.0)
    e.advance()
    e.submit(request(1, prompt=1000, new=500), 0.01)
    half = e.wake_s + 2.0
    while e.wake_s < half:
        e.advance()
    taken = e.interrupt(half)
    assert e.idle
    assert e.wake_s is None
    assert all(100 < r.generated < 500 and r.stage is Stage.ENDED for r in taken)
    # Resumed on the same engine, only the token without KV is computed again.
    again = request(0, prompt=1000 + taken[0].generated, new=500 - taken[0].generated)
    e.submit(again, 20.0)
    assert again.cached_tokens == again.prompt_tokens - 1


def test_a_decode_engine_waits_for_room_and_then_for_the_kv() -> None:
    e = engine(Role.DECODE, kv_tokens=5000, reserve_tokens=100)
    first, second = request(0, prompt=3000, new=100), request(1, prompt=3000, new=100)
    assert e.reserve(first, 0.0)
    assert not e.reserve(second, 0.0)
    assert e.wake_s is None
    e.join(first, 1.0)
    seen = run_out(e)
    assert [(o, r.rid) for _, o, r in seen] == [(Outcome.FINISHED, "r0"), (Outcome.RESERVED, "r1")]
    assert seen[0][0] == pytest.approx(1.0 + sum(COSTS.decode_curve(1).iteration_s(3001 + i) for i in range(99)))


def test_a_prefill_engine_keeps_a_prompt_until_it_was_handed_over() -> None:
    e = engine(Role.PREFILL, kv_tokens=5000)
    first, second = request(0, prompt=3000, new=100), request(1, prompt=3000, new=100)
    e.submit(first, 0.0)
    e.submit(second, 0.0)
    assert [(o, r.rid) for _, o, r in run_out(e)] == [(Outcome.PREFILLED, "r0")]
    e.abort(first, 1.0)
    assert e.kv.match("c0", "", 3001, 3001) == 2000, "the next prompt took the rest"
    assert [(o, r.rid) for _, o, r in run_out(e)] == [(Outcome.PREFILLED, "r1")]


def test_what_can_never_fit_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="r0: 120000 tokens never fit a KV budget of 100000 tokens"):
        engine().submit(request(prompt=110_000, new=10_000), 0.0)


class EngineScripts(RuleBasedStateMachine):
    """Requests come, are aborted and interrupted, weights change, time passes; a shadow book keeps the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = engine(kv_tokens=6000, chunk_tokens=1500, max_running=6, reserve_tokens=100)
        self.now_s = 0.0
        self.number = 0
        self.live: dict[str, EngineRequest] = {}
        self.finished: list[EngineRequest] = []
        self.partial = 0

    def take(self, outcomes) -> None:
        for outcome, r in outcomes:
            if outcome is Outcome.FINISHED:
                del self.live[r.rid]
                self.finished.append(r)

    @rule(
        prompt=st.integers(1, 3500),
        new=st.integers(1, 1500),
        who=st.integers(0, 5),
        root=st.integers(0, 2),
        later_s=st.floats(0, 0.5),
    )
    def submit(self, prompt, new, who, root, later_s) -> None:
        self.pass_time(later_s)
        self.number += 1
        r = EngineRequest(
            rid=f"r{self.number}",
            prompt_tokens=prompt,
            new_tokens=new,
            conversation=f"c{who}" if root != 1 else f"n{self.number}",
            root=f"task{who % 2}" if root and prompt > 300 else "",
            root_tokens=300,
        )
        if root != 1 and any(other.conversation == r.conversation for other in self.live.values()):
            return
        self.live[r.rid] = r
        self.engine.submit(r, self.now_s)

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds) -> None:
        until = self.now_s + seconds
        while (wake := self.engine.wake_s) is not None and wake <= until:
            self.take(self.engine.advance())
        self.now_s = until

    @rule(seconds=st.floats(0, 1))
    def wait_inside_an_iteration(self, seconds) -> None:
        wake = self.engine.wake_s
        self.now_s = min(self.now_s + seconds, wake) if wake is not None else self.now_s + seconds

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick) -> None:
        r = list(self.live.values())[pick % len(self.live)]
        del self.live[r.rid]
        self.take(self.engine.abort(r, self.now_s))
        self.partial += r.generated

    @rule()
    def interrupt(self) -> None:
        for r in self.engine.interrupt(self.now_s):
            del self.live[r.rid]
            self.partial += r.generated
        assert not self.live

    @rule(pause_s=st.floats(0, 2))
    def change_weights(self, pause_s) -> None:
        self.engine.weights_changed(self.now_s, pause_s)

    @invariant()
    def the_budget_holds(self) -> None:
        kv = self.engine.kv
        assert 0 <= kv.used <= kv.capacity
        assert kv.kept >= 0
        assert kv.held_roots >= 0
        assert self.engine.wake_s is None or self.engine.wake_s >= self.now_s - 1e-9

    @invariant()
    def every_token_in_hand_is_accounted_for(self) -> None:
        engine, held = self.engine, 0
        for r in engine.requests():
            held += (r.hold.tokens if r.hold else 0) + engine.generated(r) - r.generated
        assert held == engine.kv.pinned
        assert all(engine.generated(r) <= r.new_tokens for r in engine.requests())

    @invariant()
    def what_is_live_is_known_to_the_engine(self) -> None:
        assert {r.rid for r in self.engine.requests()} == self.live.keys()

    def teardown(self) -> None:
        for _ in range(100_000):
            if self.engine.wake_s is None:
                break
            self.take(self.engine.advance())
        assert not self.live, "requests wait for ever"
        assert self.engine.idle
        assert self.engine.kv.pinned == 0
        assert all(r.generated == r.new_tokens for r in self.finished)
        done = sum(r.new_tokens for r in self.finished) + self.partial
        assert self.engine.meter.generated_tokens == done, "tokens came from nowhere or went"


TestEngineScripts = EngineScripts.TestCase
TestEngineScripts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class MixedEngineScripts(EngineScripts):
    """The same with decode along prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = engine(kv_tokens=6000, chunk_tokens=700, max_running=6, reserve_tokens=0, mixed=True)


TestMixedEngineScripts = MixedEngineScripts.TestCase
TestMixedEngineScripts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.booleans(), st.integers(0, 50)), max_size=60))
def test_the_pool_never_exceeds_its_budget(moves) -> None:
    pool, holds = KvPool(100, keeps_left_paths=True), []
    for tokens, who, keep, reusable in moves:
        name = f"c{len(holds)}" if keep else f"c{who}"
        if pool.room_for(name, "root", 5, tokens + 5) >= 0 and len(holds) < 10:
            found = pool.match(name, "root", tokens + 5, reusable)
            holds.append((name, pool.take(name, "root", 5, tokens + 5, found)))
        elif holds:
            owner, hold = holds.pop(0)
            if keep:
                pool.keep(owner, hold, hold.context_tokens)
            else:
                pool.drop(hold)
        assert pool.used <= pool.capacity
        assert pool.attainable == 100 - pool.pinned - pool.held_roots
    for _, hold in holds:
        pool.drop(hold)
    pool.forget_all()
    assert pool.used == 0
    assert math.isclose(pool.pinned + pool.kept + pool.root_tokens, 0)


def test_samples_of_the_full_batch_outlast_a_long_tail() -> None:
    meter = EngineMeter()
    meter.decoded(20, 5, 0.05, 100, 2000.0)
    for _ in range(10_000):
        meter.decoded(1, 5, 0.02, 5, 30_000.0)
        meter.prefilled(300, 0.01, 1, 0)
    meter.prefilled(8000, 0.2, 3, 0)
    taken = meter.take(Role.COLOCATED, running=0, waiting=0, kv_used=0, kv_capacity=1)
    assert {sample.sequences for sample in taken.decode} == {1, 20}
    assert {sample.tokens for sample in taken.prefill} == {300, 8000}
    assert len(taken.decode) + len(taken.prefill) < 100
    again = meter.take(Role.COLOCATED, running=0, waiting=0, kv_used=0, kv_capacity=1)
    assert (again.decode, again.prefill) == ((), ())


def test_what_a_move_loses_is_what_staying_would_have_found() -> None:
    use = PrefixUse()
    use.count(tokens=100, there=True, found=60)
    before = use.copy()
    # Prompts that rewrite two fifths of what came before: who moved lost the rest, but for what was there already.
    use.count(tokens=100, there=True, found=60)
    use.count(tokens=100, there=False, found=10)
    assert use.since(before) == pytest.approx(50 / 200)
    use.count(tokens=100, there=False, found=500)
    assert use.since(before) == pytest.approx(10 / 300)
    assert PrefixUse().since(PrefixUse()) is None
