"""The makespan model that decides: eqs. (1)-(3) plus what they lack, each addition only where the profile has its data.

Added to the printed equations (symbols as in `makespan`):

- *Prefix-cache capacity.* A worker keeps the contexts of `prefix_capacity_tokens / context_tokens` trajectories.
  hit = min(1, workers·cap/B); on a miss the whole context is prefilled again instead of ΔL.
- *Work and path apart.* S belongs to the slowest trajectory; the work of a step is that of all of them. Where
  `active_by_turn` is known turn i has B·active_by_turn[i] trajectories; where only `mean_turns` is known, their sum.
- *θ from the configuration.* Where `turn_environment_s` is known, a trajectory spends o = environment + own prefill +
  hand-over of every turn outside decode, and x in it. A worker's n trajectories then give the closed cycle
  x = F + G·x/(x + o), with F = r·A and G the load of all n: environment time is counted once, as it overlaps.
- *KV queue of colocation.* Where the pool cannot hold the batch, requests wait: the fixed cost of decode is paid once
  for each part of the batch that fits.
- *Turn by turn.* Under disaggregation each group of turns takes the longer of its prefill and its decode path, so that
  a prefill pool that is too small early in a step does not vanish behind a long tail of few trajectories.
- *Hand-over.* `handover_s` a turn under disaggregation.

Both paths of a group are convex in N_P, and so are the longer one and the sum: a discrete bisection finds the best.
"""

import math
from collections.abc import Sequence

from pearl_planner.capacity import kv_bytes_per_sequence
from pearl_state.decision import MakespanTerms
from pearl_state.profile import PlatformProfile, WorkloadProfile

_GROUPS = 8


def work_turns(workload: WorkloadProfile) -> float:
    """Turns of an average trajectory: the sum of `active_by_turn`, else `mean_turns`, else S. At most S."""
    if any(workload.active_by_turn):
        return min(workload.turns, math.fsum(workload.active_by_turn))
    return min(workload.turns, workload.mean_turns) if workload.mean_turns else workload.turns


def turn_groups(workload: WorkloadProfile) -> tuple[tuple[float, float], ...]:
    """(turns, trajectories running in each of them), in order; the turns add up to S.

    Neighbouring turns are joined to at most eight groups of equal length, so that a prediction costs the same for
    sixty turns as for eight. Σ turns·trajectories = B·`work_turns`.
    """
    active: Sequence[float] = workload.active_by_turn
    if not any(active):
        share = work_turns(workload) / workload.turns
        return ((workload.turns, workload.batch * share),)
    size = -(-len(active) // _GROUPS)
    scale = workload.turns / len(active)
    # Keep the work: the list may be shorter or longer than S, which is a running average of its own.
    height = work_turns(workload) / (math.fsum(active) * scale)
    groups = []
    for start in range(0, len(active), size):
        part = active[start : start + size]
        mean = math.fsum(part) / len(part)
        if mean > 0:
            groups.append((len(part) * scale, workload.batch * mean * height))
    return tuple(groups)


def residence_s(fixed_s: float, load_s: float, outside_s: float) -> float:
    """x ≥ 0 with x = F + G·x/(x + o): time a trajectory is in a shared phase, of each cycle of x + o.

    `fixed_s` = F is there however few share it, `load_s` = G what all of them together add, `outside_s` = o is spent
    elsewhere. With o = 0 that is F + G. x rises with F and G and falls with o.
    """
    half = 0.5 * (fixed_s + load_s - outside_s)
    return half + math.sqrt(half * half + fixed_s * outside_s)


class ExtendedModel:
    """`MakespanModel` with the additions of this module. `is_printed` where the profile has data for none of them."""

    __slots__ = (
        "_beside",
        "_cap",
        "_environment",
        "_fixed",
        "_groups",
        "_handover",
        "_kv_sequences",
        "_miss",
        "_outside",
        "_over",
        "_pair_outside",
        "_per_prompt",
        "_per_sequence",
        "_stretch",
        "_transfer",
        "_turns",
        "_work",
        "is_printed",
    )

    def __init__(self, workload: WorkloadProfile, platform: PlatformProfile, kv_headroom: float = 1.0) -> None:
        turns = self._turns = workload.turns
        self._groups = turn_groups(workload)
        self._work = math.fsum(count * running for count, running in self._groups)
        prefill = platform.prefill_per_token_s
        self._per_prompt = workload.new_prompt_tokens * prefill
        self._miss = max(0.0, workload.context_tokens - workload.new_prompt_tokens) * prefill
        self._cap = math.inf
        if platform.prefix_capacity_tokens and workload.context_tokens:
            self._cap = platform.prefix_capacity_tokens / workload.context_tokens
        self._fixed = workload.response_tokens * platform.decode_fixed_s
        self._per_sequence = workload.response_tokens * platform.decode_per_sequence_s
        self._over = turns * platform.overhead_per_turn_s
        self._handover = turns * platform.handover_s
        self._transfer = workload.new_prompt_tokens * platform.kv_bytes_per_token / platform.transfer_bytes_per_s
        self._outside = workload.turn_environment_s
        self._environment = workload.environment_s or turns * workload.turn_environment_s
        if self._outside:
            # The bubble is what a trajectory does besides decode; its environment time is on the path already.
            self._stretch = 1.0
            self._pair_outside = self._outside + self._per_prompt + self._transfer + platform.handover_s
            self._beside = max(0.0, self._environment - turns * self._outside)
        else:
            self._stretch = 1.0 + workload.bubble_ratio
            self._pair_outside = 0.0
            self._beside = self._environment + self._handover
        per_sequence = kv_bytes_per_sequence(workload, platform, kv_headroom)
        bounded = platform.kv_capacity_bytes > 0 and per_sequence > 0
        self._kv_sequences = platform.kv_capacity_bytes / per_sequence if bounded else math.inf
        self.is_printed = (
            math.isinf(self._cap)
            and math.isinf(self._kv_sequences)
            and not self._outside
            and not self._handover
            and len(self._groups) == 1
            and self._work == turns * workload.batch
        )

    def _misses(self, workers: int) -> float:
        """Seconds of prefill, over the step and all workers together, that evicted prefixes cause."""
        held = self._cap * workers
        return self._miss * sum(count * (running - held) for count, running in self._groups if running > held)

    def colocated(self, workers: int) -> MakespanTerms:
        """Eq. (1) with the additions. Prefill and decode share the time a trajectory spends on its worker."""
        again = self._misses(workers)
        own = self._per_prompt + again / self._work
        load = own + self._per_sequence
        held = self._kv_sequences * workers
        stays = prefill = 0.0
        for count, running in self._groups:
            fixed = self._fixed * max(1.0, running / held)
            stay = residence_s(fixed, running / workers * load, self._outside)
            stays += count * stay
            if load:
                prefill += count * (stay - fixed) * own / load
        return MakespanTerms(
            total_s=stays + self._over + self._environment,
            prefill_s=prefill,
            decode_s=stays - prefill,
            overhead_s=self._over,
            environment_s=self._environment,
            reprefill_s=prefill * again / (self._work * own) if again else 0.0,
            bottleneck="shared",
        )

    def _walk(self, prefill_workers: int, decode_workers: int) -> tuple[float, float, float, float]:
        """Over all turns: the longer paths, prefill of ΔL, prefill again, and decode with bubbles, seconds."""
        transfer, miss, held = self._transfer, self._miss, self._cap * prefill_workers
        own = self._per_prompt / prefill_workers
        fixed, outside = self._fixed * self._stretch, self._pair_outside
        load = self._per_sequence / decode_workers
        # `residence_s`, written out: this is the inner loop of a decision.
        base, product = 0.5 * (fixed - outside), fixed * outside
        longer = new = again = decode = 0.0
        for count, running in self._groups:
            half = base + 0.5 * load * running
            stay = half + math.sqrt(half * half + product)
            insert = running * own
            new += count * insert
            if running > held:
                missed = miss * (running - held) / prefill_workers
                again += count * missed
                insert += missed
            insert += running * transfer
            decode += count * stay
            stay += outside
            longer += count * (insert if insert > stay else stay)
        return longer, new, again, decode

    def total_s(self, prefill_workers: int, decode_workers: int) -> float:
        """Makespan under disaggregation, seconds."""
        return self._walk(prefill_workers, decode_workers)[0] + self._beside

    def paths(self, prefill_workers: int, decode_workers: int) -> tuple[float, float]:
        """The two paths, each with what follows it; see `MakespanModel.paths`."""
        _, new, again, decode = self._walk(prefill_workers, decode_workers)
        outside = self._turns * self._pair_outside
        return new + again + self._work * self._transfer + self._beside, decode + outside + self._beside

    def disaggregated(self, prefill_workers: int, decode_workers: int) -> MakespanTerms:
        """Eqs. (2) and (3) with the additions."""
        longer, new, again, decode = self._walk(prefill_workers, decode_workers)
        transfer = self._work * self._transfer
        first, second = new + again + transfer, decode + self._turns * self._pair_outside
        return MakespanTerms(
            total_s=longer + self._beside,
            prefill_s=new + again,
            decode_s=decode,
            transfer_s=transfer,
            overhead_s=self._handover,
            environment_s=self._environment,
            reprefill_s=again,
            bottleneck="prefill" if first > second else "decode",
        )
