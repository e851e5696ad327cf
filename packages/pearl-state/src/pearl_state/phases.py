"""The life of a trajectory as records: which phase it entered when, with what, and which changes are legal.

Prorsa section 4.1.1 traces each trajectory from sampling to reward, because these changes announce the next seconds of
prefill and decode work. A record says what a forecast may condition on: time, prompt length, instance, how the
environment starts, which tool runs, and how many others do the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pearl_state.errors import StateError
from pearl_state.trajectory import GroupId, TrajectoryId, TrajectoryPhase
from pearl_state.worker import WorkerId

_P = TrajectoryPhase


class StartupMode(StrEnum):
    """How an environment starts."""

    PREWARMED = "prewarmed"
    """Taken from a pool of processes that are up."""
    COLD = "cold"
    """Built when the trajectory asks for it."""


PHASE_CHANGES: Final[Mapping[tuple[TrajectoryPhase | None, TrajectoryPhase], str]] = {
    (None, _P.SAMPLED): "a sample was dispatched",
    (_P.SAMPLED, _P.ENVIRONMENT_STARTING): "its environment starts, from the pool or cold",
    (_P.ENVIRONMENT_STARTING, _P.READY): "the first model request joined the ready queue",
    (_P.ENVIRONMENT_STARTING, _P.REWARD): "the environment ended before the first request",
    (_P.READY, _P.READY): "a request that waited was assigned to an instance, or taken from one",
    (_P.READY, _P.PREFILL): "an instance began to serve the prompt",
    (_P.PREFILL, _P.DECODE): "the prompt is computed: a decode admission",
    (_P.PREFILL, _P.READY): "the request was cancelled and is sent again with what it has",
    (_P.DECODE, _P.READY): "the request was cancelled and is sent again with its tokens",
    (_P.DECODE, _P.TOOL): "the response goes to the environment",
    (_P.TOOL, _P.READY): "the tool's result was appended: the next request joined the ready queue",
    (_P.TOOL, _P.REWARD): "the episode is over",
    (_P.REWARD, _P.DONE): "the reward is known",
    **{
        (phase, _P.FAILED): "the infrastructure failed it, or the run stops"
        for phase in _P
        if phase not in (_P.DONE, _P.FAILED)
    },
}
"""Every legal change with the reason for it. What is not here is illegal."""

ENDED: Final = frozenset({_P.DONE, _P.FAILED})
"""Phases of a trajectory that does not live any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """One trajectory entered a phase."""

    trajectory: TrajectoryId
    phase: TrajectoryPhase
    at_s: float
    """Seconds on the run's clock."""
    group: GroupId
    task: str = ""
    """Kind of task (not the single task): what durations are conditioned on."""
    turn: int = 0
    """0 for the first turn."""
    prompt_tokens: int = 0
    """READY, PREFILL, DECODE: the request's whole prompt, cached prefix included. TOOL, REWARD: the context that the
    trajectory has, its last response included."""
    instance: WorkerId | None = None
    """READY, PREFILL: the worker that prefills. DECODE: the worker that decodes."""
    weights: int | None = None
    """READY, PREFILL: version of the instance's weights when it was chosen, where known: what older ones computed of
    the prompt is void."""
    prefill_s: float | None = None
    """TOOL only: for how long the prompt's computation lasted, without queues and hand-over, where the worker said."""
    startup: StartupMode | None = None
    """ENVIRONMENT_STARTING only."""
    tool: str = ""
    """TOOL only: the kind of tool, where it is known."""
    load: int = 0
    """How many other trajectories are in the phase that this one enters."""
    accepted: bool | None = None
    """DONE only: whether the trajectory may be trained on."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form without what is not set."""
        out: dict[str, Any] = {"trajectory": self.trajectory, "phase": str(self.phase), "at_s": self.at_s}
        for name in (
            "group",
            "task",
            "turn",
            "prompt_tokens",
            "instance",
            "weights",
            "prefill_s",
            "tool",
            "load",
            "accepted",
        ):
            value = getattr(self, name)
            if value not in ("", None):
                out[name] = value
        if self.startup is not None:
            out["startup"] = str(self.startup)
        return out


class LiveTrajectories:
    """The trajectories that live, each with the last change of its phase: the fold of all changes so far.

    `apply` raises `StateError` for a change that `PHASE_CHANGES` does not list, and for one that goes back in time.
    """

    def __init__(self, changes: Iterable[PhaseChange] = ()) -> None:
        self.records: dict[TrajectoryId, PhaseChange] = {}
        self._counts: dict[TrajectoryPhase, int] = dict.fromkeys(TrajectoryPhase, 0)
        for change in changes:
            self.apply(change)

    def __len__(self) -> int:
        return len(self.records)

    def count(self, phase: TrajectoryPhase) -> int:
        """How many live trajectories are in `phase`."""
        return self._counts[phase]

    def apply(self, change: PhaseChange) -> PhaseChange | None:
        """Take one change in; returns the record that it replaces."""
        before = self.records.get(change.trajectory)
        phase = None if before is None else before.phase
        if (phase, change.phase) not in PHASE_CHANGES:
            raise StateError(f"{change.trajectory}: {phase or 'nothing'} -> {change.phase} is no legal change of phase")
        if before is not None and change.at_s < before.at_s:
            raise StateError(
                f"{change.trajectory}: {change.phase} at {change.at_s} s, before {phase} at {before.at_s} s"
            )
        if phase is not None:
            self._counts[phase] -= 1
        if change.phase in ENDED:
            self.records.pop(change.trajectory, None)
        else:
            self._counts[change.phase] += 1
            self.records[change.trajectory] = change
        return before


def follow_up(
    before: PhaseChange,
    phase: TrajectoryPhase,
    at_s: float,
    *,
    turn: int | None = None,
    prompt_tokens: int | None = None,
    instance: WorkerId | None = None,
    weights: int | None = None,
    prefill_s: float | None = None,
    startup: StartupMode | None = None,
    tool: str = "",
    load: int = 0,
    accepted: bool | None = None,
) -> PhaseChange:
    """The next record of the same trajectory: who it is and where it stands stay, what belonged to the phase goes."""
    return PhaseChange(
        trajectory=before.trajectory,
        phase=phase,
        at_s=at_s,
        group=before.group,
        task=before.task,
        turn=before.turn if turn is None else turn,
        prompt_tokens=before.prompt_tokens if prompt_tokens is None else prompt_tokens,
        instance=instance,
        weights=weights,
        prefill_s=prefill_s,
        startup=startup,
        tool=tool,
        load=load,
        accepted=accepted,
    )
