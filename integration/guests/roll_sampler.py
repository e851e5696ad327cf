"""PEARL's borrow gate around ROLL's `expand_sampler` and `shrink_sampler` (agentic pipeline, partial GPU mode).

ROLL gives the training GPUs to the sampler at every step. In its pipeline, replace the two calls by

    lender.lend(remaining)            # phase 5, after the weights were updated
    …                                 # rollout
    lender.take_back()                # phase 9, before training

with `lender = SamplerLender(guest, call=…, training_gpus=…, dedicated=…, lendable=…)`, where `call` is
`lambda name, *args, **kw: ray.get(getattr(train_rollout_scheduler, name).remote(*args, **kw))`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pearl_planner import Guest


class Call(Protocol):
    """Calls a method of ROLL's rollout scheduler and waits for its answer."""

    def __call__(self, method: str, target_gpus: list[int], **options: Any) -> Mapping[str, Any]:
        """Return the metrics that the method returned."""
        ...


class SamplerLender:
    """Lends the training GPUs for a step where that pays, and takes them back exactly as often."""

    def __init__(
        self,
        guest: Guest,
        *,
        call: Call,
        training_gpus: Sequence[int],
        dedicated: int,
        lendable: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not training_gpus:
            raise ValueError("training_gpus is empty: there is nothing to lend")
        self.guest = guest
        self._call = call
        self._gpus = list(training_gpus)
        self._dedicated = dedicated
        self._lendable = lendable
        self._clock = clock
        self.lent = True
        """ROLL begins with every rank in the sampler."""
        self.reason = "as the pipeline began"

    def lend(self, remaining: int, *, loaded: bool = True) -> bool:
        """Ask eq. (7) for `remaining` trajectories; where it pays, put the training ranks into the routing.

        `loaded`: the weight update has loaded them already (`skip_load`), as ROLL's does; where they are not lent, what
        it loaded is put off the training GPUs again, or training would find no memory. Returns whether they serve.
        """
        if self.lent:
            return True
        verdict = self.guest.borrow(dedicated=self._dedicated, lendable=self._lendable, remaining=remaining)
        self.reason = verdict.reason
        if verdict.borrow:
            began = self._clock()
            self._call("expand_sampler", self._gpus, skip_load=loaded)
            self.guest = self.guest.observe_toggle(activation_s=self._clock() - began)
            self.lent = True
        elif loaded:
            self._call("shrink_sampler", self._gpus)
        return self.lent

    def take_back(self) -> Mapping[str, Any]:
        """Free the training GPUs before training; nothing to do where they were not lent."""
        if not self.lent:
            return {}
        began = self._clock()
        metrics = self._call("shrink_sampler", self._gpus)
        self.guest = self.guest.observe_toggle(deactivation_s=self._clock() - began)
        self.lent = False
        return metrics
