"""What past trajectories teach about those that live: durations by class, prompt lengths, acceptance.

Fed with every change of phase, in order; nothing else is known. So a forecast can depend on the past only.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pearl_planner.forecast.durations import Average, ByClass, EmpiricalDurations, magnitude
from pearl_planner.forecast.speed import BusySpeed, ServiceTimes
from pearl_state.phases import PhaseChange, StartupMode
from pearl_state.trajectory import GroupId, TrajectoryId, TrajectoryPhase
from pearl_state.worker import WorkerId


def startup_class(record: PhaseChange) -> tuple[str, str, int]:
    """Startup mode, task (it names image and node class), concurrent starts (B.3)."""
    return str(record.startup or StartupMode.PREWARMED), record.task, magnitude(record.load)


def tool_class(record: PhaseChange) -> tuple[str, str, int, int]:
    """Task, tool, turn index, concurrent tools (B.5)."""
    return record.task, record.tool, magnitude(record.turn), magnitude(record.load)


def turn_class(record: PhaseChange) -> tuple[str, int]:
    """Task and turn index: responses and what follows them."""
    return record.task, magnitude(record.turn)


_NEVER: Final = -2
"""Older than any version of weights, and than -1, which stands for one that nobody told."""


class _Computed(NamedTuple):
    """A prompt that was computed, and by which weights."""

    tokens: int
    weights: int | None


@dataclass(slots=True)
class History:
    """All statistics of the predictor. `observe` takes a record and the one that it replaces."""

    reward_s: ByClass[EmpiricalDurations] = field(default_factory=lambda: ByClass(EmpiricalDurations))
    """T^rew by task (eq. 2)."""
    startup_s: ByClass[EmpiricalDurations] = field(default_factory=lambda: ByClass(EmpiricalDurations))
    """T^start: launch to ready queue, by `startup_class` (eq. 6)."""
    tool_s: ByClass[Average] = field(default_factory=lambda: ByClass(Average))
    """τ by `tool_class` (eq. 9)."""
    tool_durations_s: ByClass[EmpiricalDurations] = field(default_factory=lambda: ByClass(EmpiricalDurations))
    """The same durations one by one (see `PredictorSettings.tool_residuals`)."""
    tool_growth: ByClass[Average] = field(default_factory=lambda: ByClass(Average))
    """Tokens by which the next prompt exceeds the context at the tool call, by `turn_class`."""
    return_s: ByClass[EmpiricalDurations] = field(default_factory=lambda: ByClass(EmpiricalDurations))
    """Decode admission to the next request of the same trajectory, by `turn_class`."""
    return_growth: ByClass[Average] = field(default_factory=lambda: ByClass(Average))
    """Tokens by which that request's prompt exceeds the prompt before it."""
    returns: ByClass[Average] = field(default_factory=lambda: ByClass(Average))
    """Part of decodes that another request follows."""
    decode_s: ByClass[Average] = field(default_factory=lambda: ByClass(Average))
    """How long a request stays in Decode, by `turn_class`."""
    first_prompt: ByClass[Average] = field(default_factory=lambda: ByClass(Average))
    """x̂ of a first request, by task."""
    launch_delay: Average = field(default_factory=Average)
    """d̂^pw: from sampling to the ready queue, of prewarmed starts."""
    acceptance: Average = field(default_factory=Average)
    """p̂."""
    speed: BusySpeed = field(default_factory=BusySpeed)
    service: ServiceTimes = field(default_factory=ServiceTimes)
    """g, of the prompts whose workers said how long they took."""
    prompt: Average = field(default_factory=Average)
    """Length of the requests of late."""
    group_prompt: dict[GroupId, int] = field(default_factory=dict[GroupId, int])
    """First prompt of a group: its members share it."""
    fresh: dict[TrajectoryId, float] = field(default_factory=dict[TrajectoryId, float])
    """Part of a trajectory's newest prompt that no prompt of it had before; of a first prompt, which all members of a
    group share, its even share.
    """
    fresh_mean: Average = field(default_factory=Average)
    _members: dict[GroupId, int] = field(default_factory=dict[GroupId, int])
    """Trajectories that a group has had."""
    _living: dict[GroupId, int] = field(default_factory=dict[GroupId, int])
    """Trajectories that it has now: with the last one it is forgotten."""
    weights: int | None = None
    """Newest version of weights that any instance was said to prefill with."""
    _served: dict[TrajectoryId, _Computed] = field(default_factory=dict[TrajectoryId, _Computed])
    """Its newest prompt that was computed."""
    _first_served: dict[GroupId, int | None] = field(default_factory=dict[GroupId, int | None])
    """Newest version of weights by which the first prompt of a group was computed."""
    _first_at: dict[GroupId, dict[tuple[WorkerId, int | None], TrajectoryId]] = field(
        default_factory=dict[GroupId, dict[tuple[WorkerId, int | None], TrajectoryId]]
    )
    """Instances that were given the first prompt of a group, each with the version of its weights → for whom it
    computes it.
    """
    _sampled_s: dict[TrajectoryId, float] = field(default_factory=dict[TrajectoryId, float])
    _admitted: dict[TrajectoryId, PhaseChange] = field(default_factory=dict[TrajectoryId, PhaseChange])

    def observe(self, before: PhaseChange | None, change: PhaseChange) -> None:
        """Learn from one change of phase."""
        match change.phase:
            case TrajectoryPhase.SAMPLED:
                self._sampled_s[change.trajectory] = change.at_s
                self._members[change.group] = self._members.get(change.group, 0) + 1
                self._living[change.group] = self._living.get(change.group, 0) + 1
            case TrajectoryPhase.READY:
                self._ready(before, change)
            case TrajectoryPhase.PREFILL:
                if change.instance is not None and (before is None or before.instance is None):
                    self.speed.began(change.instance, change.at_s)
            case TrajectoryPhase.DECODE:
                self._decode(before, change)
            case TrajectoryPhase.TOOL:
                self._answered(before, change)
            case TrajectoryPhase.REWARD:
                self._over(before, change)
            case TrajectoryPhase.DONE | TrajectoryPhase.FAILED:
                self._ended(before, change)
            case _:
                pass

    def _ready(self, before: PhaseChange | None, change: PhaseChange) -> None:
        if before is not None:
            self._joined_queue(before, change)
        instance = change.instance
        if before is not None and before.phase in _ON_PREFILL:
            self._taken(before, change.at_s)
        if instance is not None:
            self.speed.began(instance, change.at_s)
            if change.weights is not None and (self.weights is None or change.weights > self.weights):
                self.weights = change.weights
            if before is not None and before.phase is TrajectoryPhase.READY:
                self._note_fresh(change)

    def _joined_queue(self, before: PhaseChange, change: PhaseChange) -> None:
        if before.phase is TrajectoryPhase.ENVIRONMENT_STARTING:
            self.startup_s.observe(startup_class(before), change.at_s - before.at_s)
            self.first_prompt.observe((change.task,), change.prompt_tokens)
            self.group_prompt[change.group] = change.prompt_tokens
            sampled_s = self._sampled_s.pop(change.trajectory, None)
            if sampled_s is not None and before.startup is not StartupMode.COLD:
                self.launch_delay.observe(change.at_s - sampled_s)
        elif before.phase is TrajectoryPhase.TOOL:
            self.tool_s.observe(tool_class(before), change.at_s - before.at_s)
            self.tool_durations_s.observe(tool_class(before), change.at_s - before.at_s)
            self.tool_growth.observe(turn_class(before), change.prompt_tokens - before.prompt_tokens)
            admitted = self._admitted.pop(change.trajectory, None)
            if admitted is not None:
                self.return_s.observe(turn_class(admitted), change.at_s - admitted.at_s)
                self.return_growth.observe(turn_class(admitted), change.prompt_tokens - admitted.prompt_tokens)
                self.returns.observe(turn_class(admitted), 1.0)
        else:
            return
        self.prompt.observe(change.prompt_tokens)
        self._note_fresh(change)
        self.fresh_mean.observe(self.fresh[change.trajectory])

    def _note_fresh(self, change: PhaseChange) -> None:
        """What an instance has to compute of a prompt: what neither the trajectory's newest prompt nor the group's
        first one had, as far as these were computed by the same weights. The first prompt is computed by each instance
        that gets it before any of them is done; while no instance is chosen, members share it evenly.
        """
        group, prompt = change.group, max(1, change.prompt_tokens)
        weights = self.weights if change.weights is None else change.weights
        served = self._served.get(change.trajectory)
        if served is not None and served.weights == weights:
            known = float(served.tokens)
        else:
            first = min(prompt, self.group_prompt.get(group, prompt))
            known = first * self._first_known(change, change.instance, weights)
        self.fresh[change.trajectory] = 1.0 - min(known, prompt) / prompt

    def _first_known(self, record: PhaseChange, instance: WorkerId | None, weights: int | None) -> float:
        """Part of its group's first prompt that a request finds computed."""
        group = record.group
        if group in self._first_served and self._first_served[group] == weights:
            return 1.0
        if instance is None:
            return 1.0 - 1.0 / max(1, self._members.get(group, 1))
        computes = self._first_at.setdefault(group, {}).setdefault((instance, weights), record.trajectory)
        return 0.0 if computes == record.trajectory else 1.0

    def new_tokens(self, record: PhaseChange, prompt_tokens: float) -> float:
        """What will have to be computed of the next prompt of a trajectory, of about `prompt_tokens`, with the newest
        weights.
        """
        served = self._served.get(record.trajectory)
        if served is not None and served.weights == self.weights:
            return max(0.0, prompt_tokens - served.tokens)
        first = self.group_prompt.get(record.group)
        if first is None:
            return prompt_tokens / max(1, self._members.get(record.group, 1))
        known = self._first_known(record, None, self.weights)
        return max(0.0, prompt_tokens - known * min(first, prompt_tokens))

    def _decode(self, before: PhaseChange | None, change: PhaseChange) -> None:
        self._not_returning(change.trajectory)
        self._admitted[change.trajectory] = change
        self.return_s.began(turn_class(change))
        if before is not None and before.instance is not None:
            fresh = self.fresh.get(change.trajectory, 1.0)
            self.speed.served(before.instance, before.prompt_tokens, change.at_s, fresh)
        weights = self.weights if before is None or before.weights is None else before.weights
        self._served[change.trajectory] = _Computed(change.prompt_tokens, weights)
        if _age(weights) > _age(self._first_served.get(change.group, _NEVER)):
            self._first_served[change.group] = weights

    def _taken(self, before: PhaseChange, at_s: float) -> None:
        """A request left the instance that it was given to, if any, before its prompt was computed."""
        if before.instance is None:
            return
        self.speed.cut(before.instance, at_s)
        at = self._first_at.get(before.group, {})
        for place in [place for place, computes in at.items() if computes == before.trajectory]:
            del at[place]

    def _answered(self, before: PhaseChange | None, change: PhaseChange) -> None:
        if before is None:
            return
        self.decode_s.observe(turn_class(before), change.at_s - before.at_s)
        self.tool_durations_s.began(tool_class(change))
        if change.prefill_s is not None:
            new_tokens = self.fresh.get(change.trajectory, 1.0) * before.prompt_tokens
            self.service.observe(new_tokens, change.prefill_s)

    def _over(self, before: PhaseChange | None, change: PhaseChange) -> None:
        if before is not None and before.phase is TrajectoryPhase.TOOL:
            self.tool_durations_s.left(tool_class(before))
        admitted = self._not_returning(change.trajectory)
        if admitted is not None:
            self.returns.observe(turn_class(admitted), 0.0)

    def _not_returning(self, trajectory: TrajectoryId) -> PhaseChange | None:
        """Its newest admission, if any, is followed by no other request."""
        admitted = self._admitted.pop(trajectory, None)
        if admitted is not None:
            self.return_s.left(turn_class(admitted))
        return admitted

    def _forget(self, trajectory: TrajectoryId, group: GroupId) -> None:
        self.fresh.pop(trajectory, None)
        self._served.pop(trajectory, None)
        self._sampled_s.pop(trajectory, None)
        left = self._living.pop(group, 0) - 1
        if left > 0:
            self._living[group] = left
        else:
            self._members.pop(group, None)
            self.group_prompt.pop(group, None)
            self._first_served.pop(group, None)
            self._first_at.pop(group, None)

    def _ended(self, before: PhaseChange | None, change: PhaseChange) -> None:
        if change.phase is TrajectoryPhase.DONE:
            self._done(before, change)
        else:
            self._failed(before, change)

    def _done(self, before: PhaseChange | None, change: PhaseChange) -> None:
        self._forget(change.trajectory, change.group)
        if before is not None:
            self.reward_s.observe((before.task,), change.at_s - before.at_s)
        if change.accepted is not None:
            self.acceptance.observe(float(change.accepted))

    def _failed(self, before: PhaseChange | None, change: PhaseChange) -> None:
        if before is not None and before.phase is TrajectoryPhase.TOOL:
            self.tool_durations_s.left(tool_class(before))
        if before is not None and before.phase in _ON_PREFILL:
            self._taken(before, change.at_s)
        self._forget(change.trajectory, change.group)
        self._not_returning(change.trajectory)

    def first_tokens(self, record: PhaseChange) -> float:
        """x̂ of a trajectory that has not asked yet: its group's prompt where known, else its task's mean."""
        known = self.group_prompt.get(record.group)
        if known is not None:
            return float(known)
        mean = self.first_prompt.find((record.task,))
        return mean.value if mean is not None else float(record.prompt_tokens)


def _age(weights: int | None) -> int:
    return -1 if weights is None else weights


_ON_PREFILL = (TrajectoryPhase.READY, TrajectoryPhase.PREFILL)
