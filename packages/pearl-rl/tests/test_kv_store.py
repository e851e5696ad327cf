"""KV that all workers share, and prompts that each take their attention rank's part of an iteration."""

import pytest

from pearl_rl.simulation.engine import Engine
from pearl_rl.simulation.experiments.prorsa import agent_job
from pearl_rl.simulation.kernels import DecodeCurve
from pearl_rl.simulation.kv_store import KvStore, StoredKvPool
from pearl_rl.simulation.requests import EngineRequest, SimulatedEngineLimits
from pearl_state.roles import Role


class OneSecondAThousand:
    """A second for a thousand new tokens; decode takes a hundredth."""

    def prefill_s(self, chunks, finished, sequences=0, context_tokens=0.0):
        return sum(new for new, _ in chunks) / 1000.0

    def decode_curve(self, sequences):
        return DecodeCurve([1.0, 2.0], [0.0, 0.0], 0.01)


def engine(store: KvStore | None, **limits: int) -> Engine:
    sizes = {"kv_tokens": 100_000, **limits}
    made = Engine(OneSecondAThousand(), SimulatedEngineLimits(**sizes), Role.COLOCATED)
    if store is not None:
        made.kv = StoredKvPool(sizes["kv_tokens"], store)
    return made


def request(name: str, tokens: int) -> EngineRequest:
    return EngineRequest(rid=name, prompt_tokens=tokens, new_tokens=2, conversation=name, root="task", root_tokens=1000)


def played(made: Engine, asked: EngineRequest, now_s: float) -> tuple[float, int]:
    """When it is over, and how much of its prompt was known."""
    made.submit(asked, now_s)
    while not made.idle:
        now_s = made.wake_s
        made.advance()
    return now_s, asked.cached_tokens


def test_what_one_worker_computed_another_loads_in_the_time_of_its_bytes() -> None:
    store = KvStore(seconds_per_token=1e-4)
    first, second = engine(store), engine(store)
    over_s, known = played(first, request("a", 2000), 0.0)
    assert (over_s, known) == (pytest.approx(2.01), 0)
    # Its own context, response included, is stored: 2,002 of 3,000 tokens.
    over_s, known = played(second, request("a", 3000), 10.0)
    assert known == 2002
    assert over_s == pytest.approx(10.0 + 0.998 + 2002 * 1e-4 + 0.01)
    # Of a trajectory that is new, the task's prompt is known.
    assert played(engine(store), request("b", 3000), 20.0)[1] == 1000
    assert played(engine(None), request("a", 3000), 30.0)[1] == 0


def test_other_weights_find_nothing_and_old_ones_are_forgotten() -> None:
    store = KvStore(0.0)
    store.put(1, "a", 500)
    assert store.tokens(1, "a", "") == 500
    assert store.tokens(2, "a", "") == 0
    store.put(2, "a", 300)
    store.put(3, "a", 200)
    assert [store.tokens(version, "a", "") for version in (1, 2, 3)] == [0, 300, 200]


def test_a_rate_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        KvStore(-1.0)


def test_prompts_share_an_iteration_each_with_its_ranks_part_of_it() -> None:
    one = engine(None, chunk_tokens=1000, prompt_chunk_tokens=250)
    four = [request(f"r{number}", 1000) for number in range(4)]
    for asked in four:
        one.submit(asked, 0.0)
    for _ in range(4):
        one.advance()
    # The first begins alone; then four prompts of a thousand tokens go on side by side, a quarter of it each.
    assert sum(asked.computed for asked in four) >= 3000
    assert min(asked.computed for asked in four) >= 500


def test_the_papers_instances_hold_the_latent_kv_of_each_trajectory_once() -> None:
    from pearl_rl.simulation.cluster import SimulatedCluster
    from pearl_rl.simulation.parameters import load_parameters

    scenario = agent_job("coding agent", 0, "roll").scenario
    ranked, whole = (
        SimulatedCluster(scenario, load_parameters("paper", scenario.model, {"engine.attention_ranks": ranks}))
        for ranks in (16, 1)
    )
    assert ranked.limits.kv_tokens == pytest.approx(16 * whole.limits.kv_tokens, rel=1e-4)
    assert ranked.limits.prompt_chunk_tokens == ranked.limits.chunk_tokens // 16
