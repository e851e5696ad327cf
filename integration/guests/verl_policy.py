"""PEARL's borrow gate as a dynamic scheduling policy of verl's fully asynchronous trainer.

Put this file and a module of yours beside the launch script, with `pearl-planner` installed where verl is:

    # pearl_hook.py
    import verl_policy
    from pearl_planner import Guest

    verl_policy.register(Guest.start(model="qwen3-8b", gpu="h800", tensor_parallel=2), dedicated=4, lendable=8)

and let verl import it in each of its processes, and use what it registers:

    async_training.use_dynamic_resource_scheduling=True
    async_training.dynamic_schedule_policy=pearl
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=pearl_hook

verl's hybrid replicas are PEARL's overlap workers. Its own "default" policy compares the whole wait with the switching
cost; this one asks eq. (7): what the *difference* between the two makespans saves on the samples that are missing.
"""

import importlib
import math
from types import ModuleType
from typing import Any

from pearl_planner import Guest

_SCHEDULE = "verl.experimental.fully_async_policy.dynamic_schedule"


def register(
    guest: Guest, *, dedicated: int, lendable: int, name: str = "pearl", schedule: ModuleType | None = None
) -> type:
    """Register the policy with verl under `name` and return its class.

    `dedicated` and `lendable` are rollout workers (replicas) on standalone and on trainer GPUs.
    """
    verl = schedule or importlib.import_module(_SCHEDULE)

    class PearlPolicy(verl.DynamicSchedulePolicyBase):  # type: ignore[name-defined,misc]
        """Lends hybrid replicas where eq. (7) says that it pays, and returns them where it no longer would."""

        def __init__(self, deactivate_ratio: float = 1.0, only_hybrid: bool = False) -> None:
            del deactivate_ratio  # eq. (7) takes its place
            self.guest = guest
            self.only_hybrid = only_hybrid
            self.reason = "nothing asked yet"

        def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: Any) -> bool:
            del global_steps, ctx
            return is_hybrid_active

        def deactivate_wait_samples(self, ctx: Any) -> int:
            """Samples after which a borrow for the rest would not pay any more; at least one collection."""
            cycle = ctx.step_required_samples
            if self.only_hybrid or not cycle:
                return int(cycle)
            whole = self.guest.borrow(dedicated=dedicated, lendable=lendable, remaining=self.guest.workload.batch)
            share = whole.cost_s / whole.benefit_s if whole.benefit_s > 0 else 1.0
            return int(min(cycle, max(ctx.required_samples, math.ceil(cycle * (1.0 - min(1.0, share))))))

        def should_activate_after_step(self, global_steps: int, is_hybrid_active: bool, ctx: Any) -> bool:
            del global_steps, is_hybrid_active
            if self.only_hybrid:
                self.reason = "no standalone replicas"
                return True
            cycle = ctx.step_required_samples
            missing = min(cycle, max(0, ctx.expected_samples + cycle - ctx.total_generated_samples))
            batch = self.guest.workload.batch
            remaining = math.ceil(batch * missing / cycle) if cycle else 0
            verdict = self.guest.borrow(dedicated=dedicated, lendable=lendable, remaining=remaining)
            self.reason = verdict.reason
            return verdict.borrow

        def update_after_step(self, global_steps: int, ctx: Any) -> None:
            del global_steps
            activation, deactivation = ctx.last_activate_duration_s, ctx.last_deactivate_duration_s
            self.guest = self.guest.observe_toggle(
                activation_s=activation if activation > 0 else None,
                deactivation_s=deactivation if deactivation > 0 else None,
            )

    verl.register_policy(name)(PearlPolicy)
    return PearlPolicy
