"""A journal's snapshot keeps what a run learned of its switches, whichever policy learned it."""

import json
from dataclasses import replace

import pytest

from pearl_planner.elastic import initial_state
from pearl_planner.policies import Recalling
from pearl_planner.step import step
from pearl_rl import parts
from pearl_rl.journal.state_codec import decode_state, encode_state
from pearl_rl.settings import load_settings
from pearl_state.decision import SwitchKind
from pearl_state.events import LoadForecast


@pytest.mark.parametrize("policy", ["pearl", "prorsa", "pearl+prorsa", "tiderl", "pearl+prorsa+tiderl"])
def test_learned_costs_and_forecasts_survive_a_snapshot(policy: str) -> None:
    settings = load_settings(None, [f"planner.policy={policy}"]).settings
    elastic = parts.elastic_settings(settings)
    assert isinstance(elastic.policy, Recalling)
    learned = elastic.policy.observing(SwitchKind.FLIP, 9.0)
    shape = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    state = initial_state(
        settings=replace(elastic, policy=learned),
        workload=parts.prior_workload(settings),
        platform=parts.prior_platform(settings, shape),
        training_gpus=2,
    )
    forecast = LoadForecast(
        now_s=1.0,
        horizon_s=10.0,
        prefill_tokens=5.0,
        admitted_tokens=4.0,
        decode_kv_bytes=7.0,
        prefill_tokens_per_s=3.0,
    )
    state, _ = step(state, forecast)
    again = decode_state(json.loads(json.dumps(encode_state(state))), elastic)
    assert again.settings.policy == learned != elastic.policy
    assert again.forecasts == (forecast,)
