"""Which mode the next update runs reference and actor in, where ranks can be formed anew between updates. Pure.

The cost models are those of `ref_actor` (TideRL appendix A). Both modes are asked for the same GPUs: colocated they all
hold both models, decoupled one of them holds the reference alone. Changing from one to the other means to form the
ranks anew, which costs what it was measured to cost; so the mode changes once the other one would have saved that much
since the last change, as who rents skis buys them when the rent has come to their price. Two modes that are about as
fast so never take turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pearl_planner.ref_actor import MicroBatchCosts, RefActorChoice, RefActorMode, TrainerShape, choose_mode, signals

_BACKWARD = 2.0 / 3.0
"""Part of the actor's time that is its backward: twice the arithmetic of the forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """What passes of one rank take, measured."""

    reference_s: float
    """Forward of the reference, seconds a padded token."""
    actor_s: float
    """Forward, backward and their part of the optimizer's step, seconds a padded token."""
    swap_s: float
    """Taking one model off the device and the other one onto it, seconds."""

    def towards(self, newest: "PassCosts", weight: float) -> "PassCosts":
        """The moving average: `newest` counts by `weight`."""

        def mean(old: float, new: float) -> float:
            return old + weight * (new - old)

        return PassCosts(
            reference_s=mean(self.reference_s, newest.reference_s),
            actor_s=mean(self.actor_s, newest.actor_s),
            swap_s=mean(self.swap_s, newest.swap_s),
        )

    def of_micro_batch(self, tokens: float) -> MicroBatchCosts:
        """Of a micro-batch of so many padded tokens."""
        actor_s = self.actor_s * tokens
        return MicroBatchCosts(
            ref_forward_s=self.reference_s * tokens,
            actor_forward_s=actor_s * (1.0 - _BACKWARD),
            actor_backward_s=actor_s * _BACKWARD,
            swap_s=self.swap_s,
        )


ModeCosts = Mapping[RefActorMode, PassCosts]
"""Costs by the mode that they were measured in; a mode that never ran has none."""


def costs_in(mode: RefActorMode, known: ModeCosts) -> PassCosts | None:
    """What passes cost in a mode, where it never ran by the other one's; None where nothing is known.

    A reference that is alone is whole, and gathers nothing from other ranks. So until it was measured it is taken to
    need no more than the actor's forward, which does.
    """
    if mode in known or not known:
        return known.get(mode)
    (other,) = known.values()
    if mode is RefActorMode.COLOCATED:
        return other
    return replace(other, reference_s=min(other.reference_s, other.actor_s * (1.0 - _BACKWARD)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLoad:
    """An update as one mode would divide it."""

    optimizer_steps: int
    ready_s: Sequence[float]
    """When the micro-batches of an optimizer step are ready, from its beginning on, ascending; 0: they are."""
    micro_batch_tokens: float
    """Padded tokens of the largest of those that ranks work on side by side, mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMode:
    """The mode of the next update, and what it follows from. Times are of whole updates, seconds."""

    mode: RefActorMode
    changes: bool
    """Whether the ranks are formed anew for it."""
    decoupled_s: float | None
    """None where nothing was measured, or there is only one rank."""
    colocated_s: float | None
    printed_decoupled_s: float | None
    """As the appendix prints it."""
    printed_colocated_s: float | None
    behind_s: float
    """What the other mode would have saved since the last change, this update included."""
    reform_s: float
    """What forming the ranks anew takes."""
    ras: int
    """Micro-batches of an optimizer step that are ready when it begins (N0)."""
    tprm_s: float
    """Interval at which the others become ready; 0 where there are none."""


def decide_update_mode(
    held: RefActorMode,
    behind_s: float,
    *,
    colocated: UpdateLoad,
    decoupled: UpdateLoad | None,
    costs: ModeCosts,
    ranks: int,
    reform_s: float,
) -> UpdateMode:
    """The mode of the next update. `behind_s` is that of the decision before, 0 at first and after a change.

    `ranks` are all GPUs of training; `decoupled` is None where they are one. Without any `costs` the held mode stays.
    """
    load = colocated if held is RefActorMode.COLOCATED or decoupled is None else decoupled
    found = signals(load.ready_s)
    together = _choice(colocated, costs_in(RefActorMode.COLOCATED, costs), ranks)
    apart = None if decoupled is None else _choice(decoupled, costs_in(RefActorMode.DECOUPLED, costs), ranks)
    colocated_s = None if together is None else colocated.optimizer_steps * together.colocated_s
    decoupled_s = None if apart is None or decoupled is None else decoupled.optimizer_steps * apart.decoupled_s
    other = RefActorMode.DECOUPLED if held is RefActorMode.COLOCATED else RefActorMode.COLOCATED
    saves_s = 0.0
    if colocated_s is not None and decoupled_s is not None:
        saves_s = colocated_s - decoupled_s if other is RefActorMode.DECOUPLED else decoupled_s - colocated_s
    behind_s = max(0.0, behind_s + saves_s)
    changes = saves_s > 0.0 and behind_s > reform_s
    return UpdateMode(
        mode=other if changes else held,
        changes=changes,
        decoupled_s=decoupled_s,
        colocated_s=colocated_s,
        printed_decoupled_s=None
        if apart is None or decoupled is None
        else decoupled.optimizer_steps * apart.printed_decoupled_s,
        printed_colocated_s=None if together is None else colocated.optimizer_steps * together.printed_colocated_s,
        behind_s=behind_s,
        reform_s=reform_s,
        ras=found.ras,
        tprm_s=found.tprm_s,
    )


def _choice(load: UpdateLoad, costs: PassCosts | None, ranks: int) -> RefActorChoice | None:
    """What an optimizer step of this load takes; None where its costs are not known."""
    if costs is None:
        return None
    return choose_mode(load.ready_s, costs.of_micro_batch(load.micro_batch_tokens), TrainerShape(ranks=ranks))
