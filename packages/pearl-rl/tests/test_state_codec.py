"""A journal's snapshot keeps what a run learned, and one whose parts do not belong together is refused."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pearl_planner.elastic import ElasticState, RunningPlan, initial_state
from pearl_planner.policies import Recalling
from pearl_planner.step import step
from pearl_rl import parts
from pearl_rl.journal.frames import JournalError
from pearl_rl.journal.state_codec import decode_state, encode_state
from pearl_rl.settings import load_settings
from pearl_state.configuration import Configuration
from pearl_state.decision import SwitchKind
from pearl_state.events import GpusOffered, LoadForecast
from pearl_state.plan import PlanId, Stage, TransitionPlan
from pearl_state.worker import GpuId, WorkerId


def beginning(policy: str) -> ElasticState:
    settings = load_settings(None, [f"planner.policy={policy}"]).settings
    shape = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    return initial_state(
        settings=parts.elastic_settings(settings),
        workload=parts.prior_workload(settings),
        platform=parts.prior_platform(settings, shape),
        training_gpus=2,
    )


@pytest.mark.parametrize("policy", ["pearl", "prorsa", "pearl+prorsa", "tiderl", "pearl+prorsa+tiderl"])
def test_learned_costs_and_forecasts_survive_a_snapshot(policy: str) -> None:
    state = beginning(policy)
    elastic = state.settings
    assert isinstance(elastic.policy, Recalling)
    learned = elastic.policy.observing(SwitchKind.FLIP, 9.0)
    forecast = LoadForecast(
        now_s=1.0,
        horizon_s=10.0,
        prefill_tokens=5.0,
        admitted_tokens=4.0,
        decode_kv_bytes=7.0,
        prefill_tokens_per_s=3.0,
    )
    state, _ = step(replace(state, settings=replace(elastic, policy=learned)), forecast)
    again = decode_state(json.loads(json.dumps(encode_state(state))), elastic)
    assert again.settings.policy == learned != elastic.policy
    assert again.forecasts == (forecast,)


def _worker_nobody_has(data: dict[str, Any]) -> None:
    data["available"] = [77]


def _overlap_worker_that_comes_and_goes(data: dict[str, Any]) -> None:
    data["available"] = [2]


def _gpu_of_two_slots(data: dict[str, Any]) -> None:
    data["table"]["rows"]["5"]["gpus"] = data["table"]["rows"]["4"]["gpus"]


def _two_training_workers_on_a_gpu(data: dict[str, Any]) -> None:
    rows = data["table"]["rows"]
    training = [row for row in rows.values() if row["role"] == "training"]
    borrower = next(r for r in rows.values() if r["role"] != "training" and set(r["gpus"]) & set(training[0]["gpus"]))
    borrower["role"] = "training"


def _groups_of_nobody(data: dict[str, Any]) -> None:
    data["smaller_groups"] = 0


def _fewer_than_none(data: dict[str, Any]) -> None:
    data["remaining"] = -1


def _training_that_holds_nothing(data: dict[str, Any]) -> None:
    data["table"]["holders"] = {}


def _no_table(data: dict[str, Any]) -> None:
    data["table"] = [1]


@pytest.mark.parametrize(
    "spoil",
    [
        _worker_nobody_has,
        _overlap_worker_that_comes_and_goes,
        _gpu_of_two_slots,
        _two_training_workers_on_a_gpu,
        _groups_of_nobody,
        _fewer_than_none,
        _training_that_holds_nothing,
        _no_table,
    ],
    ids=lambda spoil: spoil.__name__[1:],
)
def test_a_snapshot_whose_parts_do_not_belong_together_is_refused_in_one_line(spoil: Callable[..., None]) -> None:
    state, _ = step(beginning("pearl"), GpusOffered(now_s=0.0, gpus=frozenset(map(GpuId, (4, 5)))))
    data = json.loads(json.dumps(encode_state(state)))
    decode_state(copy.deepcopy(data), state.settings)
    spoil(data)
    with pytest.raises(JournalError) as refused:
        decode_state(data, state.settings)
    assert str(refused.value).startswith("the snapshot's state cannot be read: ")
    assert "\n" not in str(refused.value)


def test_a_stage_may_name_a_worker_that_failed_and_gave_its_slot_back_and_no_other_without_a_row() -> None:
    state = beginning("pearl")
    gone = WorkerId(77)
    plan = TransitionPlan(
        id=PlanId(1), target=Configuration.parse("1C"), stages=(Stage(park=frozenset({WorkerId(2), gone})),)
    )
    running = RunningPlan(plan=plan, overtaken=True, lost=frozenset({gone}))
    data = json.loads(json.dumps(encode_state(replace(state, running=running))))
    assert decode_state(copy.deepcopy(data), state.settings).running == running
    data["running"]["lost"] = []
    with pytest.raises(JournalError, match="the plan under way names worker 77, which has no row"):
        decode_state(data, state.settings)
