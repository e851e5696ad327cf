"""Scripts of what happens to a run: drawn from a seed, written as JSON, and made smaller where they show a fault."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

METHODS = (
    "start",
    "stop",
    "kill",
    "interrupt",
    "release",
    "resume",
    "switch_role",
    "load_weights",
    "refresh_peers",
    "samples",
    "training.release",
    "training.resume",
)
FAULTS = ("fail", "lose", "crash", "hang", "hang_after", "deaf")
PREEMPTIBLE = range(10, 16)
PINS = ("1P1D", "2P1D", "1P2D", "2C", "3C", "")


@dataclass(frozen=True, slots=True)
class Op:
    """After `wait_s`, `name` happens, with `args`."""

    wait_s: float
    name: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One run and all that happens to it. Everything else is a function of this."""

    seed: int
    borrowing: str
    gpus_per_worker: int
    steps: int
    staleness: int
    max_restarts: int
    ops: tuple[Op, ...]
    checkpoint_every: int = 1
    snapshot_every: int = 10_000
    expansion_workers: int = 64
    policy: str = "pearl"
    injection: str = "batch"
    batching: bool = False
    readiness: bool = False
    evaluate_every: int = 0
    told_after_s: float = 0.0
    """From when newer weights can be loaded until the planner is told of them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Script":
        data = json.loads(text)
        ops = tuple(Op(float(op["wait_s"]), op["name"], tuple(op["args"])) for op in data.pop("ops"))
        return cls(ops=ops, **data)


def draw(seed: int) -> Script:
    """The script of a seed."""
    rng = random.Random(seed)
    script = Script(
        seed=seed,
        borrowing=rng.choice(("off", "ungated", "ungated", "gated")),
        gpus_per_worker=rng.choice((1, 1, 1, 2)),
        steps=rng.randint(2, 4),
        staleness=rng.randint(0, 2),
        max_restarts=rng.choice((1, 3, 1000)),
        ops=tuple(_op(rng) for _ in range(rng.randint(1, 16))),
        checkpoint_every=rng.choice((1, 1, 2)),
        snapshot_every=rng.choice((10, 60, 10_000)),
        expansion_workers=rng.choice((1, 2, 64)),
        policy=rng.choice(("pearl", "pearl", "prorsa", "pearl+prorsa")),
        injection=rng.choice(("batch", "batch", "continuous")),
        batching=rng.random() < 0.3,
        readiness=rng.random() < 0.3,
        evaluate_every=rng.choice((0, 0, 1, 2)),
        # Longer than a load takes.
        told_after_s=rng.choice((0.0, 0.0, 0.0, 6.0)),
    )
    if script.policy == "pearl":
        return script
    # A forecast can move a role only where there are three workers.
    return replace(script, ops=(Op(0.0, "offer", ([10, 11, 12],)), *script.ops))


def _op(rng: random.Random) -> Op:
    name = rng.choices(tuple(_DRAWS), weights=[weight for weight, _ in _DRAWS.values()])[0]
    wait_s = rng.choice((0.0, 0.0, 0.1, 0.5, 1.0, 2.5, 7.0, 20.0)) * rng.uniform(0.5, 1.5)
    return Op(round(wait_s, 3), name, _DRAWS[name][1](rng))


def _gpus(rng: random.Random) -> tuple[Any, ...]:
    return tuple(sorted(rng.sample(PREEMPTIBLE, rng.choice((1, 1, 2, 3)))))


def _any_gpu(rng: random.Random) -> int:
    return rng.choice((2, 3, *PREEMPTIBLE, 0, 1))


_DRAWS: dict[str, tuple[int, Callable[[random.Random], tuple[Any, ...]]]] = {
    "offer": (14, lambda rng: (list(_gpus(rng)),)),
    "reclaim": (8, lambda rng: (list(_gpus(rng)), rng.choice((0.5, 5.0, 30.0)))),
    "vanish": (4, lambda rng: (list(_gpus(rng)),)),
    "crash": (7, lambda rng: (_any_gpu(rng), rng.random() < 0.7)),
    "freeze": (4, lambda rng: (_any_gpu(rng),)),
    "thaw": (1, lambda _rng: ()),
    "fault": (12, lambda rng: (rng.choice(METHODS), rng.choice(FAULTS))),
    "slow": (4, lambda rng: (rng.choice(METHODS), rng.choice((3.0, 20.0)))),
    "leak": (2, lambda rng: (rng.choice((2, 3, 4, 5)), rng.random() < 0.6)),
    "leak_training": (1, lambda rng: (rng.random() < 0.6,)),
    "repeat_answers": (4, lambda rng: (rng.randint(1, 3), rng.choice((0.0, 1.0, 30.0)))),
    "delay_answers": (3, lambda rng: (rng.randint(1, 3), rng.choice((0.5, 5.0)))),
    "transfer_failures": (3, lambda rng: (rng.randint(1, 6),)),
    "environment": (4, lambda rng: (rng.choice(("fail", "hang", "slow")), rng.randint(1, 3))),
    "trainer": (2, lambda rng: (rng.choice(("slow", "fail")),)),
    "checkpoint": (3, lambda rng: (rng.randint(1, 2),)),
    "forecast": (8, lambda rng: (*rng.choice(((0.1, 4.0), (1.0, 1.0), (4.0, 0.1))), rng.choice((1, 6, 6, 6)))),
    "jump": (3, lambda rng: (rng.choice((1.0, 10.0, 60.0)),)),
    "cordon": (2, lambda rng: (rng.randint(2, 8), rng.random() < 0.5)),
    "pin": (3, lambda rng: (rng.choice(PINS),)),
    "kill": (5, lambda rng: (rng.randint(0, 12), rng.random() < 0.5)),
}
"""What may happen → how often, relative to the others, and with which arguments."""


def shrink(script: Script, fails: Callable[[Script], bool], budget: int = 400) -> Script:
    """A smaller script that still fails: fewer ops, fewer steps, rounder times. At most `budget` runs."""
    left = [budget]

    def still(candidate: Script) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(candidate)

    size = max(1, len(script.ops) // 2)
    while size:
        at = 0
        while at < len(script.ops):
            candidate = replace(script, ops=script.ops[:at] + script.ops[at + size :])
            if still(candidate):
                script = candidate
            else:
                at += size
        size //= 2
    for steps in range(1, script.steps):
        if still(replace(script, steps=steps)):
            script = replace(script, steps=steps)
            break
    simpler = {
        "gpus_per_worker": 1,
        "borrowing": "off",
        "staleness": 0,
        "max_restarts": 1000,
        "expansion_workers": 64,
        "policy": "pearl",
        "injection": "batch",
        "batching": False,
        "readiness": False,
        "evaluate_every": 0,
    }
    for change in ({name: value} for name, value in simpler.items()):
        if still(replace(script, **change)):
            script = replace(script, **change)
    for at, op in enumerate(script.ops):
        for wait_s in (0.0, float(round(op.wait_s))):
            ops = (*script.ops[:at], replace(op, wait_s=wait_s), *script.ops[at + 1 :])
            if wait_s != op.wait_s and still(replace(script, ops=ops)):
                script = replace(script, ops=ops)
                break
    return script
