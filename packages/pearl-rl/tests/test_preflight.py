"""What is checked before a run writes anything."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_executor.availability import bundled_trace
from pearl_rl.engines import sglang_options
from pearl_rl.errors import CommandError, SettingsError
from pearl_rl.preflight import check_installed, check_parts, trace_path
from pearl_rl.settings import load_settings

NUMBERS = {
    "run.steps": st.integers(1, 10**6),
    "run.wall_limit_s": st.floats(1e-6, 1e9),
    "train.learning_rate": st.floats(0, 1),
    "train.importance_truncation": st.floats(1, 1e9),
    "train.kl_coefficient": st.floats(0, 1e9),
    "train.clip": st.booleans(),
    "train.baseline": st.sampled_from(["mean_std", "mean", "none"]),
    "train.aggregation": st.sampled_from(["token_mean", "sequence_mean"]),
    "train.max_staleness_versions": st.integers(0, 9),
    "rollout.temperature": st.floats(1e-6, 100),
    "rollout.top_p": st.floats(1e-6, 1),
    "cluster.borrowing": st.sampled_from(["off", "ungated", "gated"]),
    "cluster.max_preemptible_gpus": st.integers(0, 99),
    "availability.source": st.sampled_from(["trace", "fixed"]),
    "availability.segment": st.sampled_from(["segment1", "segment2", "segment3"]),
    "availability.time_scale": st.floats(1e-3, 1e6),
    "availability.start_s": st.floats(0, 1e6),
    "availability.notice_s": st.floats(0, 1e6),
    "device.paced": st.booleans(),
    "device.kv_bytes_per_s": st.floats(0, 1e12),
    "planner.model": st.sampled_from(["extended", "printed"]),
    "planner.mode_threshold": st.floats(0.5, 0.99),
    "limits.executor.idle_s": st.floats(1e-3, 1e6),
}
"""Settings that are valid whatever the others are."""


def text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@settings(deadline=None, max_examples=60)
@given(st.fixed_dictionaries({}, optional=NUMBERS))
def test_whatever_the_settings_allow_every_part_takes(changes):
    overrides = [f"{key}={text(value)}" for key, value in changes.items()]
    check_parts(load_settings(None, overrides).settings)


@pytest.mark.parametrize(
    ("policy", "configuration"),
    [("pearl", ""), ("colocated_elastic", ""), ("static_pd", "2P3D"), ("fixed", ""), ("fixed", "4C")],
)
def test_every_policy_can_be_built(policy, configuration):
    overrides = [f"planner.policy={policy}", f"planner.configuration={configuration}"]
    check_parts(load_settings(None, overrides).settings)


def test_what_only_a_part_refuses_is_refused_in_one_line():
    greedy = load_settings(None, ["rollout.temperature=0", "train.learning_rate=0"]).settings
    with pytest.raises(SettingsError, match="settings cannot be used: temperature is 0"):
        check_parts(greedy)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.name=bisekt"], "environment.name = bisekt: unknown environment 'bisekt'"),
        (["environment.args.commits=1"], "environment.name = bisect: "),
        (["environment.args.no_such_argument=1"], "no_such_argument"),
        (["environment.name=no_such_module:suite"], "cannot be imported"),
        (["environment.name=pathlib:no_such_suite"], "has no 'no_such_suite'"),
        (["environment.name=:suite"], "environment.name = :suite: "),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_in_one_line(overrides, words):
    with pytest.raises(SettingsError) as caught:
        check_parts(load_settings(None, overrides).settings)
    assert words in str(caught.value)
    assert str(caught.value) == " ".join(str(caught.value).split())


def test_every_environment_of_one_file_is_made_from_its_defaults():
    for name in ("bisect", "calculator"):
        check_parts(load_settings(None, [f"environment.name={name}"]).settings)


def test_a_trace_is_bundled_or_a_file(tmp_path):
    assert trace_path(load_settings().settings) == bundled_trace()
    file = tmp_path / "mine.csv"
    assert trace_path(load_settings(None, [f"availability.trace={file}"]).settings) == Path(file)


def test_a_control_file_need_not_exist_yet(tmp_path):
    overrides = ["availability.source=control", f"availability.control_file={tmp_path / 'later.jsonl'}"]
    check_parts(load_settings(None, overrides).settings)


def test_what_training_needs_is_looked_for_by_name(monkeypatch):
    monkeypatch.setattr("pearl_rl.preflight.find_spec", lambda name: None if name == "tokenizers" else object())
    with pytest.raises(CommandError, match="train needs tokenizers, not installed here; run `uv sync`"):
        check_installed(load_settings().settings)


def test_ray_is_asked_for_only_where_the_job_runs_on_it(monkeypatch):
    monkeypatch.setattr("pearl_rl.preflight.find_spec", lambda name: None if name == "ray" else object())
    check_installed(load_settings().settings)
    with pytest.raises(CommandError, match=r"needs the package ray, not installed here; run `uv sync --group ray`"):
        check_installed(load_settings(None, ["cluster.runtime=ray"]).settings)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.kind=sglang"], "workers need a Python that has SGLang"),
        (["engine.kind=sglang", 'engine.sglang.interpreter=["python"]'], "cannot be paced; use device.paced=false"),
        (
            [
                "device.paced=false",
                'engine.sglang.interpreter=["python"]',
                "engine.kind=sglang",
                'engine.sglang.variables=["NAME"]',
            ],
            "write it as NAME=VALUE",
        ),
        *(
            (
                [
                    "device.paced=false",
                    'engine.sglang.interpreter=["python"]',
                    "engine.kind=sglang",
                    f'engine.sglang.host="{host}"',
                ],
                f'"{host}" is no IP address',
            )
            for host in ("localhost", "0::1")
        ),
    ],
)
def test_settings_of_sglang_that_contradict_each_other_are_refused(overrides, words):
    with pytest.raises(SettingsError, match=words):
        load_settings(None, overrides)


def test_the_interpreter_is_asked_for_its_sglang_before_anything_is_written(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.8\n")
    python.chmod(0o755)
    overrides = ["engine.kind=sglang", "device.paced=false", f'engine.sglang.interpreter=["{python}"]']
    with pytest.raises(SettingsError, match=r"has SGLang 0\.5\.8, not 0\.5\.23; install it into an environment"):
        check_parts(load_settings(None, overrides).settings)


def test_servers_of_training_gpus_are_held_where_the_settings_say_so():
    overrides = ["engine.kind=sglang", "device.paced=false", 'engine.sglang.interpreter=["python"]']
    chosen = load_settings(None, [*overrides, "engine.sglang.gated=true"]).settings
    assert sglang_options(chosen, Path("model")).held == (frozenset({0}), frozenset({1}))
    assert sglang_options(load_settings(None, overrides).settings, Path("model")).held == ()


def test_servers_may_listen_elsewhere_only_where_the_settings_say_so():
    overrides = ["engine.kind=sglang", "device.paced=false", 'engine.sglang.interpreter=["python"]']
    assert not sglang_options(load_settings(None, overrides).settings, Path("model")).open_ports
    chosen = load_settings(None, [*overrides, "engine.sglang.open_ports=true"]).settings
    assert sglang_options(chosen, Path("model")).open_ports
