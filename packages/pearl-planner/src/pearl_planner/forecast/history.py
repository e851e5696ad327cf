"""What past trajectories teach about those that live: durations by class, prompt lengths, acceptance.

Fed with every change of phase, in order; nothing else is known. So a forecast can depend on the past only.
"""

from dataclasses import dataclass, field

from pearl_planner.forecast.durations import Average, ByClass, EmpiricalDurations, magnitude
from pearl_planner.forecast.speed import BusySpeed
from pearl_state.phases import PhaseChange, StartupMode
from pearl_state.trajectory import GroupId, TrajectoryId, TrajectoryPhase


def startup_class(record: PhaseChange) -> tuple[str, str, int]:
    """Startup mode, task (it names image and node class), concurrent starts (B.3)."""
    return str(record.startup or StartupMode.PREWARMED), record.task, magnitude(record.load)


def tool_class(record: PhaseChange) -> tuple[str, str, int, int]:
    """Task, tool, turn index, concurrent tools (B.5)."""
    return record.task, record.tool, magnitude(record.turn), magnitude(record.load)


def turn_class(record: PhaseChange) -> tuple[str, int]:
    """Task and turn index: responses and what follows them."""
    return record.task, magnitude(record.turn)


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
    _served: dict[TrajectoryId, int] = field(default_factory=dict[TrajectoryId, int])
    """Its newest prompt that was computed."""
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
                if before is not None:
                    self.decode_s.observe(turn_class(before), change.at_s - before.at_s)
            case TrajectoryPhase.REWARD:
                self._over(change)
            case TrajectoryPhase.DONE | TrajectoryPhase.FAILED:
                self._ended(before, change)
            case _:
                pass

    def _ready(self, before: PhaseChange | None, change: PhaseChange) -> None:
        if before is not None:
            self._joined_queue(before, change)
        instance = change.instance
        if before is not None and before.instance is not None and before.phase is not TrajectoryPhase.DECODE:
            self.speed.cut(before.instance, change.at_s)
        if instance is not None:
            self.speed.began(instance, change.at_s)

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
        served = self._served.get(change.trajectory)
        if served is None:
            self.fresh[change.trajectory] = 1.0 / max(1, self._members.get(change.group, 1))
        else:
            self.fresh[change.trajectory] = 1.0 - min(served, change.prompt_tokens) / max(1, change.prompt_tokens)

    def _decode(self, before: PhaseChange | None, change: PhaseChange) -> None:
        self._admitted[change.trajectory] = change
        if before is not None and before.instance is not None:
            fresh = self.fresh.get(change.trajectory, 1.0)
            self.speed.served(before.instance, before.prompt_tokens, change.at_s, fresh)
        self._served[change.trajectory] = change.prompt_tokens

    def _over(self, change: PhaseChange) -> None:
        admitted = self._admitted.pop(change.trajectory, None)
        if admitted is not None:
            self.returns.observe(turn_class(admitted), 0.0)

    def _forget(self, trajectory: TrajectoryId, group: GroupId) -> None:
        self.fresh.pop(trajectory, None)
        self._served.pop(trajectory, None)
        left = self._living.pop(group, 0) - 1
        if left > 0:
            self._living[group] = left
        else:
            self._members.pop(group, None)
            self.group_prompt.pop(group, None)

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
        self._forget(change.trajectory, change.group)
        self._admitted.pop(change.trajectory, None)
        self._sampled_s.pop(change.trajectory, None)
        if before is not None and before.instance is not None and before.phase in _ON_PREFILL:
            self.speed.cut(before.instance, change.at_s)

    def first_tokens(self, record: PhaseChange) -> float:
        """x̂ of a trajectory that has not asked yet: its group's prompt where known, else its task's mean."""
        known = self.group_prompt.get(record.group)
        if known is not None:
            return float(known)
        mean = self.first_prompt.find((record.task,))
        return mean.value if mean is not None else float(record.prompt_tokens)


_ON_PREFILL = (TrajectoryPhase.READY, TrajectoryPhase.PREFILL)
