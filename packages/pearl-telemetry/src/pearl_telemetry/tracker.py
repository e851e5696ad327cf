"""The Runtime Tracker: from finished turns to a workload profile, averaged across steps (PEARL sections 4.1 and 5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pearl_state.profile import WorkloadProfile
from pearl_state.samples import TurnSample
from pearl_telemetry.ema import Ema

_AVERAGED = (
    "turns",
    "slowest_turns",
    "mean_turns",
    "new_prompt_tokens",
    "response_tokens",
    "context_tokens",
    "decoded_context_tokens",
    "environment_s",
    "turn_environment_s",
    "retained_tokens",
)
"""Fields of the profile that are moving averages under the same name."""

_OPTIONAL = {
    "bubble_ratio": "nobody told the decoding fraction",
    "moved_fraction": "too few workers to choose from, or no trajectory came again",
    "pair_moved_fraction": "too few prefill workers to choose from, or no trajectory came again",
    "renewed_fraction": "nobody told what caches held",
    "shared_tokens": "nobody told what caches held",
}
"""Those that a step may lack → why."""

_CHOICE = 0.4
"""Least chance of meeting another worker at which moves between workers say something: two of them give a half."""


class Slowest(NamedTuple):
    """The trajectory that took longest in its step."""

    turns: float
    """What it generated, in turns of mean length."""
    visits: int
    """Turns that it really took."""
    environment_s: float


@dataclass(slots=True)
class _Step:
    """Sums over the turns of one step."""

    turns_of: list[int] = field(default_factory=list[int])
    turns: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    retained_tokens: int = 0
    context_tokens: int = 0
    decoded_context_tokens: float = 0.0
    """Contexts at which tokens were generated, of all of them together."""
    max_context_tokens: int = 0
    context_of_turn: list[int] = field(default_factory=list[int])
    """Context at turn 1, 2, …, of all who reached it together."""
    slowest_s: float = -1.0
    slowest_response_tokens: int = 0
    slowest_turns: int = 0
    pauses: int = 0
    pause_s: float = 0.0
    slowest_environment_s: float = 0.0
    told: bool = True
    """Whether all turns say what caches held."""
    first_cached_tokens: int = 0
    later_cached_tokens: int = 0
    before_tokens: int = 0
    """Context before the new prompt, of all turns but first ones."""
    before_retained_tokens: int = 0
    """Part of it that the turn right before generated."""

    def look_up(self, samples: Sequence[TurnSample]) -> None:
        """Take in what caches held for the turns of a trajectory."""
        retained = 0
        for sample in samples:
            if sample.cached_tokens is None:
                self.told = False
                return
            if sample.turn == 0:
                self.first_cached_tokens += sample.cached_tokens
            else:
                self.later_cached_tokens += sample.cached_tokens
                self.before_tokens += sample.context_tokens - sample.new_prompt_tokens
                self.before_retained_tokens += retained
            retained = sample.retained_tokens

    def prefixes(self, paired: bool, moved: float) -> dict[str, float]:
        """`shared_tokens` and `renewed_fraction`: what caches lacked beyond the part that trajectories left behind."""
        if not self.told:
            return {}
        values = {"shared_tokens": self.first_cached_tokens / self.turns}
        # A prefill worker never saw the response before: lacking it is no loss.
        held = self.before_tokens - (self.before_retained_tokens if paired else 0)
        if held > 0:
            values["renewed_fraction"] = min(1.0, max(0.0, 1.0 - self.later_cached_tokens / held - moved))
        return values


class RuntimeTracker:
    """Is told the turns of each finished trajectory and the end of each step; says what the workload looks like.

    `weight` is that of the newest step in the moving averages. A step with fewer than `least_trajectories` finished
    trajectories says nothing.
    """

    def __init__(self, *, weight: float = 0.3, least_trajectories: int = 4) -> None:
        self._ema = Ema(weight)
        self._least = least_trajectories
        self._steps: dict[int, _Step] = {}
        self._batch = 0
        self._steady = False
        self._max_context = 0
        self.slowest: Slowest | None = None
        """The slowest trajectory of the newest step; None where that step said nothing."""

    def observe_turns(self, samples: Sequence[TurnSample]) -> None:
        """All turns of one finished trajectory, in order."""
        if not samples:
            return
        step = self._steps.setdefault(samples[0].step, _Step())
        environment_s = sum(sample.environment_s for sample in samples)
        total_s = environment_s + sum(s.prefill_s + s.decode_s + s.queue_s for s in samples)
        step.look_up(samples)
        step.turns_of.append(len(samples))
        step.turns += len(samples)
        step.context_of_turn += [0] * (len(samples) - len(step.context_of_turn))
        for number, sample in enumerate(samples):
            step.context_of_turn[number] += sample.context_tokens
            step.prompt_tokens += sample.new_prompt_tokens
            step.response_tokens += sample.response_tokens
            step.retained_tokens += sample.retained_tokens
            step.context_tokens += sample.context_tokens
            read = sample.context_tokens + 0.5 * sample.response_tokens
            step.decoded_context_tokens += sample.response_tokens * read
            if not sample.last:
                # What follows a trajectory's last turn is no pause between turns.
                step.pauses += 1
                step.pause_s += sample.environment_s
            step.max_context_tokens = max(step.max_context_tokens, sample.context_tokens + sample.response_tokens)
        if total_s > step.slowest_s:
            step.slowest_s = total_s
            step.slowest_turns = len(samples)
            step.slowest_response_tokens = sum(sample.response_tokens for sample in samples)
            step.slowest_environment_s = environment_s

    def finish_step(
        self,
        *,
        step: int,
        batch: int,
        makespan_s: float,
        decoding_fraction: float | None,
        borrowed: bool = False,
        paired: bool | None = None,
        moved: float | None = None,
        choice: float = 0.0,
        steady: bool = False,
    ) -> None:
        """A batch of `batch` trajectories completed after `makespan_s` seconds.

        `decoding_fraction` is f, the time-weighted fraction of trajectories that were decoding; None where nobody
        measured it. `paired` says whether the step ran under disaggregation (None: under both modes), `moved` which
        part of prefixes trajectories left behind on other workers, and `choice` the chance that a worker taken at
        random is another one. `steady` says that as many trajectories are under way at any time, because others enter
        as these end: then a batch has no tail, and its path is that of a mean trajectory. Turns of earlier steps that
        were never finished are forgotten.
        """
        seen = self._steps.pop(step, None)
        self._steps = {number: sums for number, sums in self._steps.items() if number > step}
        self.slowest = None
        if seen is None or len(seen.turns_of) < self._least or not seen.response_tokens:
            return
        self._batch, self._steady = batch, steady
        # What a trajectory generates decides how long its path is, in however many turns.
        path = seen.slowest_response_tokens * seen.turns / seen.response_tokens
        self.slowest = Slowest(path, seen.slowest_turns, seen.slowest_environment_s)
        self._max_context = max(self._max_context, seen.max_context_tokens)
        turns = seen.turns
        values = {
            "turns": path,
            "slowest_turns": float(seen.slowest_turns),
            "mean_turns": turns / len(seen.turns_of),
            "new_prompt_tokens": seen.prompt_tokens / turns,
            "response_tokens": seen.response_tokens / turns,
            "retained_tokens": seen.retained_tokens / turns,
            "context_tokens": seen.context_tokens / turns,
            "decoded_context_tokens": seen.decoded_context_tokens / seen.response_tokens,
            "environment_s": seen.slowest_environment_s,
            "turn_environment_s": seen.pause_s / seen.pauses if seen.pauses else 0.0,
            "makespan_borrowed_s" if borrowed else "makespan_plain_s": makespan_s,
        }
        if decoding_fraction is not None and 0 < decoding_fraction <= 1:
            values["bubble_ratio"] = (1 - decoding_fraction) / decoding_fraction
        if paired is not None:
            values |= seen.prefixes(paired, moved or 0.0)
            if moved is not None and choice >= _CHOICE:
                values["pair_moved_fraction" if paired else "moved_fraction"] = min(1.0, moved / choice)
        count = len(seen.turns_of)
        reached = [sum(n > turn for n in seen.turns_of) for turn in range(max(seen.turns_of))]
        contexts = [total / n for total, n in zip(seen.context_of_turn, reached, strict=True)]
        self._ema.observe(values, [n / count for n in reached], contexts)

    @property
    def steps(self) -> int:
        """Steps that the profile rests on."""
        return self._ema.count

    def profile(self) -> WorkloadProfile | None:
        """The workload as it looks now; None before the first step that said something."""
        ema = self._ema
        if not ema.count:
            return None
        measured = dict.fromkeys(
            (*_AVERAGED, "active_by_turn", "context_by_turn"), f"telemetry, moving average over {ema.count} steps"
        )
        measured |= dict.fromkeys(("batch", "steady"), "telemetry, newest step")
        measured["max_context_tokens"] = f"telemetry, largest over {ema.count} steps"
        for name, missing in _OPTIONAL.items():
            times = ema.counts.get(name, 0)
            measured[name] = f"telemetry, moving average over {times} steps" if times else f"not measured: {missing}"
        moved = {name: ema.get(name, 0.0) for name in ("moved_fraction", "pair_moved_fraction")}
        for name, other in (("moved_fraction", "pair_moved_fraction"), ("pair_moved_fraction", "moved_fraction")):
            # Until a mode was seen, trajectories are assumed to move as often as in the other one.
            if name not in ema.counts and other in ema.counts:
                moved[name] = ema[other]
                measured[name] = f"assumed to be {other}: its mode was not seen"
        turns, outside_s = ema["turns"], ema["environment_s"]
        if self._steady:
            turns, outside_s = ema["mean_turns"], ema["mean_turns"] * ema["turn_environment_s"]
            measured["turns"] = "telemetry: the mean, since others enter as trajectories end"
        return WorkloadProfile(
            batch=self._batch,
            turns=max(1.0, turns),
            new_prompt_tokens=ema["new_prompt_tokens"],
            response_tokens=ema["response_tokens"],
            bubble_ratio=ema.get("bubble_ratio", 0.0),
            environment_s=outside_s,
            context_tokens=ema["context_tokens"],
            decoded_context_tokens=ema["decoded_context_tokens"],
            max_context_tokens=float(self._max_context),
            slowest_turns=0.0 if self._steady else ema["slowest_turns"],
            mean_turns=ema["mean_turns"],
            turn_environment_s=ema["turn_environment_s"],
            retained_tokens=ema["retained_tokens"],
            moved_fraction=moved["moved_fraction"],
            pair_moved_fraction=moved["pair_moved_fraction"],
            renewed_fraction=ema.get("renewed_fraction", 0.0),
            shared_tokens=ema.get("shared_tokens", 0.0),
            steady=self._steady,
            active_by_turn=() if self._steady else ema.fractions,
            context_by_turn=() if self._steady else ema.amounts,
            origin=measured,
        )
