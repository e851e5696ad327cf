"""The command line: exit codes, one-line errors, and what each command prints."""

import json
import subprocess
import sys
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pearl_rl.cli import app
from pearl_rl.settings import Settings, load_settings

RUNNER = CliRunner()


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `pearl-rl`."""
    result = RUNNER.invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: str) -> str:
    """The one line of a command that must end with exit code 2 and print nothing else."""
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("pearl-rl: ")
    assert err.count("\n") == 1
    return err


# ---- the program itself ---------------------------------------------------------------------------------------------


def test_help_names_every_command_and_exit_code():
    code, out, _ = run("--help")
    assert code == 0
    assert all(word in out for word in ("train", "plan", "config", "doctor", "--version", "5 ended early"))
    assert run()[:2] == (0, out)


def test_every_command_explains_its_options():
    for command in (["train"], ["plan"], ["doctor"], ["config"], ["config", "show"], ["config", "schema"]):
        code, out, _ = run(*command, "--help")
        assert code == 0
        assert "Usage:" in out


def test_the_version_is_the_packages():
    assert run("--version")[1].startswith("pearl-rl 0.")


def test_help_imports_nothing_heavy():
    code = "import atexit, sys\nfrom pearl_rl.cli import app\natexit.register(lambda: print(*sys.modules))\n"
    code += "app(['--help'])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.split())
    assert not loaded & {"torch", "transformers", "numpy", "pydantic", "asyncio", "rich.console", "pearl_planner"}


def test_usage_errors_are_one_line():
    assert "No such command 'trian'" in refused("trian")
    assert "--bogus" in refused("train", "--bogus")
    assert "--workers" in refused("plan", "--model", "m", "--gpu", "g", "--workers", "many")
    assert "Missing option" in refused("plan")


# ---- settings -------------------------------------------------------------------------------------------------------


def test_config_show_prints_a_configuration_that_loads_again(tmp_path):
    code, out, _ = run("config", "show", "--set", "run.seed=9")
    assert code == 0
    assert tomllib.loads(out)["run"]["seed"] == 9
    assert "seed = 9  # --set" in out
    path = tmp_path / "again.toml"
    path.write_text(out)
    assert load_settings(path).settings == load_settings(None, ["run.seed=9"]).settings


def test_config_show_as_json_holds_settings_and_origins(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[run]\nseed = 9\n")
    data = json.loads(run("config", "show", str(path), "--json")[1])
    assert data["settings"]["run"]["seed"] == 9
    assert data["origins"]["run.seed"] == f"{path}:2"
    assert data["origins"]["run.steps"] == "default"


def test_config_schema_is_json_of_every_section():
    schema = json.loads(run("config", "schema")[1])
    assert set(schema["properties"]) == set(Settings.model_fields)


def test_config_validate_counts_what_differs_from_the_default_job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[run]\nseed = 9\n")
    code, out, _ = run("config", "validate", str(path), "--set", "run.steps=2")
    assert code == 0
    assert out.startswith("ok: ")
    assert "2 of them not" in out


@pytest.mark.parametrize("command", [["train"], ["config", "validate"]])
def test_a_bad_trace_is_refused_with_its_line(tmp_path, command):
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,preemptible_gpus\n0,1\n10,2\n5,1\n")
    line = refused(*command, "--set", f"availability.trace={trace}", "--set", "availability.segment=")
    assert f"{trace}:4" in line
    assert "time goes back" in line
    assert "no segment 'none'" in refused(*command, "--set", "availability.segment=none")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "planner.no_such_key=1"],
        ["/nonexistent.toml"],
        ["--set", "rollout.batch_size=nan"],
        ["--set", "model.path=/nonexistent"],
        ["--set", "cluster.gpus_per_worker=3"],
    ],
)
def test_train_refuses_bad_settings_before_it_writes_anything(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    refused("train", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_one_line_and_exit_code_2_of_the_process(tmp_path):
    command = [sys.executable, "-c", "from pearl_rl.cli import main; main()", "train", "--set", "train.no_key=1"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("pearl-rl: --set: unknown key train.no_key")
    assert answer.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12), max_size=4))
def test_no_arguments_end_in_a_traceback(arguments):
    code, _, err = run("config", *arguments)
    assert code in (0, 2)
    if code == 2:
        assert err.startswith("pearl-rl: ")
        assert err.count("\n") == 1
