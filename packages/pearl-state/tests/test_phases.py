"""The life of a trajectory: which changes are legal, and what the fold of all of them knows."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_state.errors import StateError
from pearl_state.phases import ENDED, PHASE_CHANGES, LiveTrajectories, PhaseChange, StartupMode, follow_up
from pearl_state.trajectory import GroupId, TrajectoryId, TrajectoryPhase
from pearl_state.worker import WorkerId

P = TrajectoryPhase
SAMPLED = PhaseChange(trajectory=TrajectoryId("t1"), phase=P.SAMPLED, at_s=1.0, group=GroupId("g1"), task="swe")


def test_a_life_from_sampling_to_its_end_leaves_nothing_behind() -> None:
    live = LiveTrajectories()
    record = SAMPLED
    live.apply(record)
    way = (P.ENVIRONMENT_STARTING, P.READY, P.READY, P.PREFILL, P.DECODE, P.TOOL, P.READY, P.PREFILL, P.READY)
    for i, phase in enumerate((*way, P.PREFILL, P.DECODE, P.TOOL, P.REWARD)):
        record = follow_up(record, phase, 2.0 + i, prompt_tokens=100 * i)
        assert live.apply(record) is not None
        assert live.records == {SAMPLED.trajectory: record}
        assert live.count(phase) == len(live) == 1
    live.apply(follow_up(record, P.DONE, 99.0, accepted=True))
    assert len(live) == 0
    assert sum(live.count(phase) for phase in P) == 0


@settings(deadline=None)
@given(st.lists(st.sampled_from(list(P)), max_size=12))
def test_exactly_the_listed_changes_are_legal(phases: list[TrajectoryPhase]) -> None:
    live = LiveTrajectories()
    here: TrajectoryPhase | None = None
    for phase in phases:
        change = replace(SAMPLED, phase=phase)
        if (here, phase) in PHASE_CHANGES:
            live.apply(change)
            here = None if phase in ENDED else phase
        else:
            with pytest.raises(StateError, match="no legal change of phase"):
                live.apply(change)
    assert len(live) == (here is not None)


def test_every_phase_can_be_reached_and_every_live_one_can_fail() -> None:
    assert {after for _, after in PHASE_CHANGES} == set(P)
    assert all((phase, P.FAILED) in PHASE_CHANGES for phase in P if phase not in ENDED)
    assert not any(before in ENDED for before, _ in PHASE_CHANGES)


def test_a_change_that_goes_back_in_time_is_refused() -> None:
    live = LiveTrajectories([SAMPLED])
    with pytest.raises(StateError, match=r"at 0\.5 s, before sampled at 1\.0 s"):
        live.apply(follow_up(SAMPLED, P.ENVIRONMENT_STARTING, 0.5))


def test_a_record_becomes_json_without_what_is_not_set() -> None:
    record = follow_up(SAMPLED, P.ENVIRONMENT_STARTING, 2.0, startup=StartupMode.COLD, load=3, instance=WorkerId(7))
    assert json.loads(json.dumps(record.to_json())) == {
        "trajectory": "t1",
        "phase": "environment_starting",
        "at_s": 2.0,
        "group": "g1",
        "task": "swe",
        "turn": 0,
        "prompt_tokens": 0,
        "instance": 7,
        "load": 3,
        "startup": "cold",
    }
