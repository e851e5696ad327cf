"""Each adapter at the boundary of its framework: same names, same order of calls, same meaning of what comes back."""

import importlib.util
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pearl_planner import Guest
from pearl_state import Configuration

HERE = Path(__file__).parent


def adapter(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"guest_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def guest() -> Guest:
    return Guest.start(model="qwen3-8b", gpu="h800", tensor_parallel=2, batch=64)


# ---- verl -----------------------------------------------------------------------------------------------------------


class Schedule(ModuleType):
    """verl's `dynamic_schedule`: a registry and an abstract base whose methods the trainer calls in this order."""

    def __init__(self) -> None:
        super().__init__("dynamic_schedule")
        self.registry: dict[str, type] = {}

        class DynamicSchedulePolicyBase(ABC):
            @abstractmethod
            def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: Any) -> bool: ...

            @abstractmethod
            def deactivate_wait_samples(self, ctx: Any) -> int: ...

            @abstractmethod
            def should_activate_after_step(self, global_steps: int, is_hybrid_active: bool, ctx: Any) -> bool: ...

            def update_after_step(self, global_steps: int, ctx: Any) -> None:
                return None

            def request_rebalance(self, global_steps: int, ctx: Any) -> None:
                return None

        self.DynamicSchedulePolicyBase = DynamicSchedulePolicyBase

    def register_policy(self, name: str) -> Any:
        def decorate(cls: type) -> type:
            self.registry[name] = cls
            return cls

        return decorate


@dataclass
class Context:
    """Fields of verl's `DynamicScheduleContext` that a policy reads."""

    required_samples: int = 16
    trigger_parameter_sync_step: int = 4
    total_generated_samples: int = 0
    expected_samples: int = 0
    buffer_samples: int = 0
    step_wait_times: list[float] = field(default_factory=list)
    step_wait_samples: list[int] = field(default_factory=list)
    only_hybrid: bool = False
    last_activate_duration_s: float = 0.0
    last_deactivate_duration_s: float = 0.0
    step_required_samples: int = 64


def verl_policy(**options: Any) -> Any:
    schedule = Schedule()
    adapter("verl_policy").register(guest(), dedicated=4, lendable=8, schedule=schedule)
    return schedule.registry["pearl"](deactivate_ratio=0.3, **options)


def test_verl_lends_for_a_whole_cycle_and_not_when_its_samples_are_there() -> None:
    policy = verl_policy()
    assert policy.should_activate_after_step(1, False, Context())
    assert not policy.should_activate_after_step(1, False, Context(total_generated_samples=64))
    assert "batch is complete" in policy.reason


def test_verl_stops_lending_once_switching_was_measured_to_be_dear() -> None:
    policy = verl_policy()
    for _ in range(20):
        policy.update_after_step(1, Context(last_activate_duration_s=50_000.0, last_deactivate_duration_s=50_000.0))
    assert not policy.should_activate_after_step(2, False, Context())
    assert "<=" in policy.reason


def test_verl_waits_for_fewer_samples_the_dearer_a_switch_is() -> None:
    cheap, dear = verl_policy(), verl_policy()
    for _ in range(20):
        cheap.update_after_step(1, Context(last_activate_duration_s=0.5, last_deactivate_duration_s=0.5))
    dear.update_after_step(1, Context(last_activate_duration_s=100.0, last_deactivate_duration_s=100.0))
    context = Context()
    assert context.required_samples <= dear.deactivate_wait_samples(context)
    assert dear.deactivate_wait_samples(context) < cheap.deactivate_wait_samples(context) <= 64
    assert cheap.should_deactivate(1, True, context)
    assert not cheap.should_deactivate(1, False, context)


def test_verl_without_standalone_replicas_always_lends_and_waits_for_all() -> None:
    policy = verl_policy(only_hybrid=True)
    assert policy.should_activate_after_step(1, False, Context(total_generated_samples=64))
    assert policy.deactivate_wait_samples(Context()) == 64


# ---- ROLL -----------------------------------------------------------------------------------------------------------


class Scheduler:
    """ROLL's rollout scheduler: both calls refuse an empty list, and return metrics."""

    def __init__(self, clock: list[float]) -> None:
        self.calls: list[tuple[str, list[int], dict[str, Any]]] = []
        self.clock = clock

    def __call__(self, method: str, target_gpus: list[int], **options: Any) -> dict[str, Any]:
        if not target_gpus:
            raise ValueError(f"[{method}] target_gpus cannot be empty")
        self.calls.append((method, list(target_gpus), options))
        self.clock[0] += 2.0
        return {f"{method.split('_')[0]}_duration_ms": 2000.0, "aborted": 0}


def test_roll_lends_where_it_pays_and_takes_back_exactly_as_often() -> None:
    clock = [0.0]
    scheduler = Scheduler(clock)
    lender = adapter("roll_sampler").SamplerLender(
        guest(), call=scheduler, training_gpus=[0, 1, 2, 3], dedicated=4, lendable=8, clock=lambda: clock[0]
    )
    assert lender.take_back()["shrink_duration_ms"] == 2000.0
    assert lender.take_back() == {}
    assert lender.lend(64)
    assert lender.lend(64)
    lender.take_back()
    assert not lender.lend(0, loaded=False)
    lender.take_back()
    assert [name for name, _, _ in scheduler.calls] == ["shrink_sampler", "expand_sampler", "shrink_sampler"]
    assert scheduler.calls[1][1:] == ([0, 1, 2, 3], {"skip_load": True})
    assert lender.guest.costs.toggle_s == pytest.approx(4.0)


def test_roll_s_weight_update_is_put_off_the_training_gpus_where_they_are_not_lent() -> None:
    scheduler = Scheduler([0.0])
    lender = adapter("roll_sampler").SamplerLender(
        guest(), call=scheduler, training_gpus=[0, 1], dedicated=4, lendable=8, clock=lambda: 0.0
    )
    lender.take_back()
    cost_s = lender.guest.costs.toggle_s
    assert not lender.lend(0)
    assert lender.take_back() == {}
    assert [name for name, _, _ in scheduler.calls] == ["shrink_sampler", "shrink_sampler"]
    # That was no hand-over, so it is no measurement of one.
    assert lender.guest.costs.toggle_s == cost_s


def test_roll_with_nothing_to_lend_is_one_line() -> None:
    with pytest.raises(ValueError, match="training_gpus is empty"):
        adapter("roll_sampler").SamplerLender(guest(), call=Scheduler([0.0]), training_gpus=[], dedicated=1, lendable=1)


# ---- slime ----------------------------------------------------------------------------------------------------------


def sample(prompt: int, mask: list[int], pause_s: float = 6.0) -> SimpleNamespace:
    return SimpleNamespace(
        tokens=[1] * (prompt + len(mask)), response_length=len(mask), loss_mask=mask, non_generation_time=pause_s
    )


def test_slime_samples_are_cut_into_turns_at_the_loss_mask() -> None:
    turns = adapter("slime_log").turns_of(3, 100, [1] * 5 + [0] * 20 + [1] * 7 + [0] * 2, 6.0)
    assert [(t.new_prompt_tokens, t.response_tokens, t.context_tokens, t.last) for t in turns] == [
        (100, 5, 100, False),
        (20, 7, 125, True),
    ]
    assert [t.environment_s for t in turns] == [6.0, 0.0]


def test_slime_gets_its_next_server_groups_and_still_logs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "next.yaml"
    monkeypatch.setenv("PEARL_SGLANG_CONFIG", str(target))
    monkeypatch.setenv("PEARL_TRUST_PRIOR", "1")
    module = adapter("slime_log")
    args = SimpleNamespace(rollout_num_gpus=16, rollout_num_gpus_per_engine=2, prefill_num_servers=None)
    samples = [sample(2000, ([1] * 70 + [0] * 1700) * 15 + [1] * 70, 900.0) for _ in range(64)]
    assert module.log_rollout(0, args, samples, {}, 700.0) is False
    text = target.read_text()
    groups = [line.split(": ")[1] for line in text.splitlines() if "worker_type" in line]
    gpus = sum(int(line.split(": ")[1]) for line in text.splitlines() if "num_gpus:" in line)
    assert gpus == 16
    assert groups in (["prefill", "decode"], ["regular"])
    assert module._guest.workload.batch == 64
    assert module._guest.workload.new_prompt_tokens == pytest.approx(1700, rel=0.05)
    assert [p.name for p in tmp_path.iterdir()] == ["next.yaml"]


@pytest.mark.parametrize(("text", "kinds"), [("2P3D", ["prefill", "decode"]), ("4C", ["regular"])])
def test_slime_server_groups_hold_every_gpu(text: str, kinds: list[str]) -> None:
    written = adapter("slime_log").server_groups(Configuration.parse(text), 2)
    assert [line.split(": ")[1] for line in written.splitlines() if "worker_type" in line] == kinds


def test_slime_started_with_the_groups_that_it_was_given_is_known_to_serve_with_them() -> None:
    module = adapter("slime_log")
    for text in ("2P3D", "4C"):
        chosen = Configuration.parse(text)
        assert module.running_groups(module.server_groups(chosen, 2), 2) == chosen
    several = """
sglang:
  - {name: judge, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 8}]}
  - name: actor
    num_gpus_per_engine: 4
    engine_groups:
      - {worker_type: prefill, num_gpus: 4}
      - {worker_type: decode, num_gpus: 16, num_gpus_per_engine: 8}
      - {worker_type: placeholder, num_gpus: 2}
"""
    assert module.running_groups(several, 2) == Configuration(prefill=1, decode=2)


def test_slime_that_follows_the_planner_is_asked_from_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = adapter("slime_log")
    started = tmp_path / "started.yaml"
    started.write_text(module.server_groups(Configuration(prefill=3, decode=5), 2))
    monkeypatch.setenv("PEARL_SGLANG_CONFIG", str(tmp_path / "next.yaml"))
    args = SimpleNamespace(
        rollout_num_gpus=16, rollout_num_gpus_per_engine=2, prefill_num_servers=None, sglang_config=str(started)
    )
    module.log_rollout(0, args, [sample(2000, [1] * 70) for _ in range(8)], {}, 60.0)
    assert module._guest.current == Configuration(prefill=3, decode=5)
