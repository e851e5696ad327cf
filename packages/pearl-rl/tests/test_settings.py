"""Settings: the default job, layers and origins, what is refused and how it is said."""

import json
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl_executor.limits import Limits
from pearl_executor.pacing import Pace
from pearl_planner.decide import DecideSettings
from pearl_planner.switching import SwitchCosts
from pearl_rl.settings import ResolvedSettings, Settings, SettingsError, json_schema, load_settings, to_json, to_toml
from pearl_rl.settings.keys import OF_SCENARIOS, ONLY_IN_SCENARIOS, leaves, nearest, sections
from pearl_rl.settings.labels import parse_labels
from pearl_rl.settings.load import default_text, parse_override
from pearl_rl.settings.platform import DeviceSettings, ExecutorLimitSettings, PlannerSettings
from pearl_rl.settings.toml_lines import key_lines
from pearl_rl.settings.write import toml_value
from pearl_rl.simulation.scenario import Scenario, load_scenario

PARTS = {"limits": Limits, "pace": Pace, "decide": DecideSettings, "costs": SwitchCosts}
FILES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused(*overrides: str, config: Path | None = None) -> str:
    """The one line with which settings are refused."""
    with pytest.raises(SettingsError) as caught:
        load_settings(config, overrides)
    text = str(caught.value)
    assert text == " ".join(text.split())
    return text


def written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


# ---- the default job ------------------------------------------------------------------------------------------------


def test_the_default_job_is_valid_and_every_value_comes_from_it():
    resolved = load_settings()
    assert set(resolved.origins) == set(leaves()) - {("environment", "args")} | {
        ("environment", "args", key) for key in resolved.settings.environment.args
    }
    assert set(resolved.origins.values()) == {"default"}


def test_every_setting_stands_in_the_default_job_and_is_explained():
    document = tomllib.loads(default_text())
    for path in leaves():
        node = document
        for part in path:
            node = node[part]
    schema = json_schema()
    for path, section in sections().items():
        properties = schema["properties"] if not path else schema["$defs"][section.__name__]["properties"]
        for name in section.model_fields:
            assert properties[name]["description"], f"{'.'.join((*path, name))} is not explained"


def test_the_schema_asks_for_no_key_and_carries_the_default_jobs_values():
    schema = json_schema()
    assert "required" not in json.dumps(schema)
    default = load_settings().settings
    assert schema["$defs"]["TrainSettings"]["properties"]["group_size"]["default"] == default.train.group_size
    assert schema["$defs"]["TinyModelSettings"]["properties"]["layers"]["default"] == default.model.tiny.layers


def test_reading_settings_imports_no_engine_and_no_terminal():
    code = "import sys, pearl_rl.settings as s; s.load_settings(); print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "ray", "sglang", "rich", "typer", "numpy"} & set(answer.stdout.split())


def test_limits_pace_and_planner_knobs_are_named_as_the_parts_that_take_them_name_them():
    names = {key: {field.name for field in fields(part)} for key, part in PARTS.items()}
    assert set(ExecutorLimitSettings.model_fields) == names["limits"]
    assert set(DeviceSettings.model_fields) - {"paced", "training_update_s"} == names["pace"]
    assert {"ratio_threshold", "mode_threshold", "prefill_load_limit", "kv_headroom", "model"} <= names["decide"]
    assert {"flip_s", "relaunch_s", "new_worker_s"} <= names["costs"]
    assert {
        "ratio_threshold",
        "mode_threshold",
        "prefill_load_limit",
        "kv_headroom",
        "model",
        "flip_s",
        "relaunch_s",
        "new_worker_s",
    } <= set(PlannerSettings.model_fields)


# ---- layers and origins ---------------------------------------------------------------------------------------------


def test_the_file_overrides_the_default_job_and_set_overrides_the_file(tmp_path):
    path = written(tmp_path, "# mine\n[run]\nseed = 7\n\n[train]\nlearning_rate = 0.5  # much\n")
    resolved = load_settings(path, ["run.steps=3", "train.learning_rate=0.25"])
    assert (resolved.settings.run.seed, resolved.settings.run.steps) == (7, 3)
    assert resolved.settings.train.learning_rate == 0.25
    assert resolved.origins["run", "seed"] == f"{path}:3"
    assert resolved.origins["run", "steps"] == "--set"
    assert resolved.origins["train", "learning_rate"] == "--set"
    assert resolved.origins["train", "group_size"] == "default"


def test_the_last_of_two_overrides_wins():
    assert load_settings(None, ["run.seed=1", "run.seed=2"]).settings.run.seed == 2


def test_another_environment_starts_without_the_arguments_of_the_one_below(tmp_path):
    path = written(tmp_path, '[environment]\nname = "a"\n[environment.args]\ndepth = 3\n')
    assert load_settings(path).settings.environment.args == {"depth": 3}
    assert load_settings(path, ["environment.args.width=2"]).settings.environment.args == {"depth": 3, "width": 2}
    other = load_settings(path, ["environment.args.width=2", "environment.name=b"])
    assert other.settings.environment.args == {"width": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 1e-3", 1e-3),
        ("a.b=true", True),
        ("a.b=words", "words"),
        ("a.b=./some/path", "./some/path"),
        ('a.b="3"', "3"),
        ("a.b=", ""),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=x=y", "x=y"),
        ("a.b=2P3D", "2P3D"),
    ],
)
def test_an_override_is_toml_or_else_a_bare_string(text, value):
    assert parse_override(text) == (("a", "b"), value)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = written(tmp_path, "\ufeff[run]\nsteps = 7\n")
    assert load_settings(path).settings.run.steps == 7
    assert load_scenario(str(path)).run.steps == 7


def test_an_override_may_set_a_whole_table():
    resolved = load_settings(None, ["train={group_size = 4, groups_per_step = 16}", "rollout.batch_size=64"])
    assert (resolved.settings.train.group_size, resolved.settings.train.groups_per_step) == (4, 16)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_origin_and_the_nearest_valid_one(tmp_path):
    path = written(tmp_path, "[train]\n\nlearning_rat = 1\n")
    line = refused(config=path)
    assert line == f"{path}:3: unknown key train.learning_rat; the nearest is train.learning_rate"
    assert refused("planner.no_such_key=1").startswith(
        "--set: unknown key planner.no_such_key; the nearest is planner."
    )
    assert "the nearest is rollout.batch_size" in refused("train.batch_size=3")
    assert "the nearest is train" in refused("trian.group_size=3")
    assert "the nearest is environment" in refused("env=3")


def test_a_scenario_s_key_is_named_with_the_job_s_and_the_other_way_round():
    assert refused("policy.name=x") == (
        "--set: unknown key policy.name; the nearest is planner.policy; it is a setting of `pearl-rl simulate`, "
        "and this must be a job"
    )
    assert refused("rollout.group_size=4") == "--set: unknown key rollout.group_size; the nearest is train.group_size"
    with pytest.raises(
        SettingsError, match=r"unknown key planner\.policy; the nearest is policy\.name; it is a setting"
    ):
        load_scenario("paper-segment1", ["planner.policy=x"])


def test_what_only_scenarios_have_is_what_scenarios_have_and_jobs_have_not():
    assert set(Scenario.model_fields) - set(Settings.model_fields) == ONLY_IN_SCENARIOS
    for of_scenario, of_job in OF_SCENARIOS.items():
        node = Scenario
        for part in of_scenario[:-1]:
            node = node.model_fields[part].annotation
        assert of_scenario[-1] in node.model_fields
        assert of_scenario not in leaves()
        assert of_job in leaves()


@given(st.sampled_from(leaves()), st.integers(0, 30))
def test_one_wrong_letter_still_finds_the_key(path, position):
    name = path[-1]
    position %= len(name)
    wrong = name[:position] + "#" + name[position + 1 :]
    assert nearest((*path[:-1], wrong)).split(".")[:-1] == list(path[:-1])


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("rollout.batch_size=nan", "rollout.batch_size = nan: must be a whole number"),
        ("telemetry.otlp_endpoint=localhost:4318", "must begin with http:// or https://, like http://localhost:4318"),
        ("train.learning_rate=inf", "must be a finite number"),
        ("train.learning_rate=nan", "must be a finite number"),
        ("train.learning_rate=1e400", "must be a finite number"),
        ("run.steps=-1", "run.steps = -1: must be at least 1"),
        ("run.steps=1.5", "must be a whole number"),
        ('run.steps="1"', "run.steps = 1: must be a whole number, not text"),
        ("run.steps=" + "9" * 5_000, "run.steps = 999"),
        ("train.learning_rate=" + "9" * 400, "must be"),
        ("run.seed=true", "run.seed = true: must be a whole number"),
        ("device.paced=1", "must be true or false"),
        ("model.path=3", "must be a string"),
        ("cluster.borrowing=sometimes", "must be 'off', 'ungated' or 'gated'"),
        ("availability.time_scale=0", "must be greater than 0"),
        ("run.dir=", "must not be empty"),
        ("train=3", "is a section"),
        ("run.seed={a=1}", "must be a whole number"),
        ("environment.args.x={a=1}", "must be true, false, a finite number, a string, or a list"),
        ("environment.args.x=nan", "must be true, false, a finite number"),
        ("run.seed", "is not like section.key=value"),
        ("=3", "is not like section.key=value"),
        ("run..seed=3", "is not like section.key=value"),
        ("run.seed=[1,", "is not valid TOML"),
        ("run.dir=a\nb", "unprintable"),
        ("run.dir=a\udce4", "unprintable"),
        ("model.tiny.head_dim=15", "must be a multiple of 2"),
    ],
)
def test_a_bad_value_is_one_line_with_the_key_and_the_rule(override, rule):
    line = refused(override)
    assert rule in line
    assert len(line) < 250


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["cluster.gpus_per_worker=4", "cluster.reserved_rollout_gpus=10", "cluster.training_gpus=4"],
            ["10 reserved rollout GPUs do not divide by gpus_per_worker=4; use 8 or 12"],
        ),
        (
            ["cluster.gpus_per_worker=4", "cluster.max_preemptible_gpus=3", "cluster.reserved_rollout_gpus=2"],
            ["2 reserved rollout GPUs", "use 4 (and ", " more)"],
        ),
        (
            ["train.group_size=4", "train.groups_per_step=8", "rollout.batch_size=63"],
            ["--set: rollout.batch_size = 63:", "8 × 4", "use rollout.batch_size=32"],
        ),
        (["cluster.reserved_rollout_gpus=0", "cluster.max_preemptible_gpus=0"], ["no GPUs are left for rollout"]),
        (["model.path=no/such/folder"], ["model.path = no/such/folder:", "does not exist", "'tiny'"]),
        (["run.resume_from=no/such/folder"], ["does not exist"]),
        (
            ["model.tiny.heads=4", "model.tiny.kv_heads=3"],
            ["3 key/value heads do not divide 4 heads", "model.tiny.kv_heads=2"],
        ),
        (["model.max_context_tokens=16"], ["leave no room for a prompt"]),
        (["engine.kv_tokens=16"], ["does not hold one trajectory"]),
        (["availability.source=control"], ["needs availability.control_file"]),
        (["availability.trace="], ["needs availability.trace"]),
        (["planner.policy=static_pd"], ["planner.configuration", "2P3D"]),
        (["planner.policy=fixed", "planner.configuration=0C"], ["without workers"]),
        (["planner.policy=fixed", "planner.configuration=2D"], ["2P3D"]),
        (["planner.policy=pearl", "planner.configuration=2C"], ["leave planner.configuration empty"]),
        (["limits.executor.sync_s=300"], ["limits.executor.sync_s = 300", "use limits.rollout.no_worker_s=300"]),
        (["limits.executor.start_s=61"], ["limits.executor.start_s = 61", "use limits.rollout.no_worker_s=61 or more"]),
        (["planner.mode_threshold=0"], ["use planner.mode_threshold="]),
        (["rollout.temperature=0"], ["nothing is learned"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_fix(overrides, words):
    line = refused(*overrides)
    assert all(word in line for word in words), line


def test_a_contradiction_is_laid_to_the_setting_that_was_given_not_to_a_default():
    groups = load_settings().settings.train.groups_per_step
    assert refused("train.group_size=3").startswith("--set: train.group_size = 3:")
    assert f"use rollout.batch_size={3 * groups}" in refused("train.group_size=3")


def test_training_gpus_need_not_divide_where_nothing_is_borrowed():
    odd = ["cluster.gpus_per_worker=2", "cluster.training_gpus=3"]
    odd += ["cluster.reserved_rollout_gpus=2", "cluster.max_preemptible_gpus=4"]
    assert "training GPUs" in refused(*odd)
    assert load_settings(None, [*odd, "cluster.borrowing=off"]).settings.cluster.training_gpus == 3


def test_a_model_folder_needs_its_config(tmp_path):
    assert "without config.json" in refused(f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    assert load_settings(None, [f"model.path={tmp_path}"]).settings.model.path == str(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[run\nseed = 1", "is not valid TOML"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"a = " + b"[" * 5_000, "is nested too deeply"),
        (b"run = 3", "run = 3: is a section"),
        (b"[[run]]\nseed = 1", "is a section"),
        (b"[run]\nseed = 1979-05-27", "must be a whole number"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, words):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    line = refused(config=path)
    assert line.startswith(str(path))
    assert words in line


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert "no such file" in refused(config=tmp_path / "none.toml")
    assert "cannot be read" in refused(config=tmp_path)
    assert "cannot be read" in refused(config=Path("a\0b"))


# ---- properties -----------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
ARGUMENTS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8), SCALARS | st.lists(SCALARS, max_size=3), max_size=4
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "run.seed": st.integers(0, 2**32 - 1),
        "run.wall_limit_s": st.floats(1e-9, 1e9),
        "run.dir": st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
        "train.learning_rate": st.floats(0, 1),
        "cluster.borrowing": st.sampled_from(["off", "ungated", "gated"]),
        "device.paced": st.booleans(),
        "device.kv_bytes_per_s": st.integers(0, 10**15) | st.floats(0, 1e300),
        "availability.segment": st.text(st.characters(codec="utf-8"), max_size=20),
    },
)


@FILES
@given(changes=CHANGES, arguments=ARGUMENTS)
def test_resolved_settings_load_to_the_same_settings(tmp_path, changes, arguments):
    document = load_settings().settings.model_dump()
    for key, value in changes.items():
        section, name = key.split(".")
        document[section][name] = value
    document["environment"]["args"] = arguments
    before = Settings.model_validate(document)
    path = written(tmp_path, to_toml(ResolvedSettings(before, {})))
    after = load_settings(path)
    assert after.settings == before
    assert to_toml(after, origins=False) == to_toml(ResolvedSettings(before, {}), origins=False)
    assert json.loads(json.dumps(to_json(after)["settings"], allow_nan=False)) == before.model_dump(mode="json")
    again = load_settings(written(tmp_path, to_toml(after)))
    assert again.settings == before


ANYTHING = st.recursive(
    SCALARS | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab-é ", max_size=3), inner),
)
NAMES = st.sampled_from(
    [*(".".join(path) for path in leaves()), *Settings.model_fields, "x", "train.x", "model.tiny.y"]
)


def loads_or_says_why(config: Path | None, overrides: list[str]) -> None:
    """Settings, or one line."""
    try:
        load_settings(config, overrides)
    except SettingsError as error:
        text = str(error)
        assert text
        assert text == " ".join(text.split())


def inline(value: object) -> str:
    """TOML of anything, tables and non-finite numbers included."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(key)} = {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(inline(item) for item in value)}]"
    return toml_value(value)


@FILES
@given(st.text())
def test_any_text_as_a_file_is_settings_or_one_line(tmp_path, text):
    loads_or_says_why(written(tmp_path, text), [])


@FILES
@given(st.lists(st.tuples(NAMES, ANYTHING), max_size=4))
def test_any_values_in_a_file_are_settings_or_one_line(tmp_path, entries):
    text = "".join(f"{name} = {inline(value)}\n" for name, value in entries)
    loads_or_says_why(written(tmp_path, text), [])


@given(st.lists(st.text() | st.builds("{}={}".format, NAMES, st.text() | ANYTHING.map(inline)), max_size=3))
def test_any_override_is_settings_or_one_line(overrides):
    loads_or_says_why(None, overrides)


COMMENTS = st.sampled_from(["", "# a = 1 [x]", "   ", "\t# ''' \"\"\" {"])
VALUES = st.sampled_from(
    [
        "1",
        '"# not a comment"',
        "'[x]'",
        "[\n  1, # one\n  2,\n]",
        '"""\n[no]\nb = 2\n"""',
        "'''a\nc = 3'''",
        "{ p = 1 }",
        '"\\""',
        '"""x""""',
    ]
)


@given(st.lists(st.tuples(COMMENTS, st.booleans(), VALUES, COMMENTS), max_size=8))
def test_every_key_is_found_on_its_line(entries):
    lines: list[str] = []
    expected = {}
    table: tuple[str, ...] = ()
    for number, (before, opens, value, after) in enumerate(entries):
        lines.append(before)
        if opens:
            table = (f"t{number}", "a#b]")
            lines.append(f"[ t{number} . 'a#b]' ] {after}")
            expected[table] = len(lines)
        lines += f'"k{number}".x = {value} {after}'.split("\n")
        expected[*table, f"k{number}", "x"] = len(lines) - value.count("\n")
    text = "\n".join(lines)
    tomllib.loads(text)
    assert key_lines(text) == expected


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["cluster.ray.address=auto"], r'names a cluster that nobody uses; set cluster.runtime="ray" too'),
        (["cluster.ray.reserved_labels=elastic"], r"'elastic' is no label; write key=value"),
    ],
)
def test_settings_of_ray_that_cannot_hold_are_refused_in_one_line(overrides, line):
    with pytest.raises(SettingsError, match=line):
        load_settings(None, overrides)


def test_labels_are_pairs_separated_by_commas():
    assert parse_labels(" a=b, pearl.zone=elastic ,") == {"a": "b", "pearl.zone": "elastic"}
    assert parse_labels("") == {}
