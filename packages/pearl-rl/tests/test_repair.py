"""The environment `repair`, with a shell of this machine in place of a container."""

import asyncio
import json
import subprocess

import pytest

from pearl_rl.rollout.environments.protocol import EnvironmentFailure, EnvironmentSettingsError
from pearl_rl.rollout.environments.repair import RepairArguments, RepairSuite, judged, read_tasks, shortened
from pearl_rl.rollout.environments.suites import make_suite

ROW = {
    "instance_id": "demo__demo-1",
    "image": "demo:latest",
    "problem_statement": "add(1, 2) must be 3.",
    "evaluation": "grep -q 'a + b' add.py",
}


class LocalShell:
    """A sandbox that is a folder; it is used as mini-swe-agent's are."""

    def __init__(self, config, folder):
        self.config = config
        self.folder = folder
        self.cleaned = 0
        (folder / "add.py").write_text("def add(a, b):\n    return a - b\n")

    def execute(self, command, cwd="", *, timeout=None):
        done = subprocess.run(
            ["bash", "-lc", command], cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False
        )
        return {"output": done.stdout + done.stderr, "returncode": done.returncode}

    def cleanup(self):
        self.cleaned += 1


@pytest.fixture
def play(tmp_path):
    """Plays actions on the task and returns the shells, the first observation and all results."""

    def run(*actions, row=ROW, make=None, **arguments):
        (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n\n")
        shells = []

        def start(config):
            shells.append(LocalShell(config, tmp_path))
            return shells[-1]

        suite = RepairSuite(
            RepairArguments(tasks=str(tmp_path / "tasks.jsonl"), parallel=2, **arguments), make or start
        )

        async def main():
            await suite.start()
            environment = suite.environment()
            try:
                first = await environment.reset(suite.tasks(0).task(0))
                return shells, first, [await environment.step(action) for action in actions]
            finally:
                await environment.close()
                await environment.close()
                await suite.close()

        return asyncio.run(main())

    return run


def bash(command):
    return f"I will do this.\n```bash\n{command}\n```"


def test_a_repair_is_played_in_the_tasks_sandbox_and_rewarded_by_its_evaluation(play):
    shells, first, (looked, fixed, ended) = play(
        bash("cat add.py"), bash("sed -i 's/a - b/a + b/' add.py"), bash("submit")
    )
    assert [message.role for message in first.messages] == ["system", "user"]
    assert "add(1, 2) must be 3." in first.text
    assert "return a - b" in looked.observation.text
    assert (looked.reward, looked.done, fixed.done) == (0.0, False, False)
    assert (ended.reward, ended.done) == (1.0, True)
    assert ended.info == {"commands": 3, "mistakes": 0, "solved": True}
    assert shells[0].config == {"environment_class": "docker", "image": "demo:latest", "cwd": "/testbed", "timeout": 60}
    assert shells[0].cleaned == 1


def test_what_is_not_solved_earns_nothing_and_turns_run_out(play):
    _, _, (told, ended) = play("no command at all", bash("ls"), turns=2)
    assert "found 0" in told.observation.text
    assert (ended.reward, ended.done, ended.info["solved"], ended.info["mistakes"]) == (0.0, True, False, 1)


def test_a_command_that_takes_too_long_is_the_agents_affair(play):
    _, _, (slow,) = play(bash("sleep 5"), command_s=1)
    assert "exit code 124" in slow.observation.text
    assert not slow.done


def test_a_sandbox_that_does_not_start_is_no_reward_of_zero(play):
    def broken(config):
        raise RuntimeError("no such image")

    with pytest.raises(
        EnvironmentFailure, match="demo__demo-1: the sandbox does not start: RuntimeError: no such image"
    ):
        play(make=broken)


def test_named_tests_must_all_be_reported_as_passed():
    output = "PASSED tests/test_a.py::test_one\nFAILED tests/test_a.py::test_two\ntest_three (t.C) ... ok\n"
    assert judged(output, 1, ["tests/test_a.py::test_one", "test_three (t.C)"])
    assert not judged(output, 0, ["tests/test_a.py::test_two"])
    assert judged("", 0, None)
    assert not judged("", 1, [])


def test_long_output_keeps_its_beginning_and_its_end():
    assert shortened("short", 100) == "short"
    text = shortened("a" * 500 + "b" * 500, 200)
    assert text.startswith("a" * 100 + "\n[800 characters left out]\n")
    assert text.endswith("b" * 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"tasks\.jsonl:1: is no JSON"),
        ("\n" + json.dumps({**ROW, "image": 3}), r"tasks\.jsonl:2: a task needs the text 'image'"),
        ("", "holds no task"),
    ],
)
def test_a_file_that_holds_no_tasks_is_refused_with_its_line(tmp_path, text, message):
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    with pytest.raises(EnvironmentSettingsError, match=message):
        read_tasks(file)


def test_arguments_are_checked_and_the_suite_has_a_name(tmp_path):
    with pytest.raises(EnvironmentSettingsError, match="tasks is empty; name a file"):
        make_suite("repair", {})
    with pytest.raises(EnvironmentSettingsError, match="turns = 0; use 1 or more"):
        make_suite("repair", {"tasks": "x", "turns": 0})
    with pytest.raises(EnvironmentSettingsError, match="cannot be read"):
        make_suite("repair", {"tasks": str(tmp_path / "none.jsonl")})


def test_sandboxes_that_take_actions_get_the_command_in_one(play, tmp_path):
    class Newer(LocalShell):
        def execute(self, action, cwd="", *, timeout=None):
            return super().execute(action["command"], cwd, timeout=timeout)

    _, _, (seen,) = play(bash("echo hello"), make=lambda config: Newer(config, tmp_path))
    assert "hello" in seen.observation.text
