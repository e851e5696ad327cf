"""Repairing a repository with shell commands, as in SWE-bench: each task has an image, a problem and an evaluation.

Commands run in a sandbox of mini-swe-agent (`pip install mini-swe-agent`): Docker on this machine, Singularity, or a
remote one. The agent writes one command a turn in a `bash` block and sees what it prints; `submit` ends the episode,
and the task's evaluation then says whether the problem is solved.
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from pearl_rl.rollout.environments.arguments import read_arguments
from pearl_rl.rollout.environments.protocol import (
    Demonstration,
    EnvironmentFailure,
    EnvironmentSettingsError,
    Message,
    Observation,
    StepResult,
    Task,
    TaskSource,
    observe,
)
from pearl_rl.rollout.environments.task_sources import DatasetTasks

COMMAND: Final = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
SUBMIT: Final = "submit"
_FIELDS: Final = ("instance_id", "image", "problem_statement", "evaluation")
_SYSTEM: Final = (
    "You repair a software repository. Answer each time with exactly one command in a block ```bash … ```; you then "
    "see what it printed. Every command starts in the repository's folder and remembers nothing of the one before but "
    "files. When the problem is solved, answer with the command `submit`."
)


class Shell(Protocol):
    """A sandbox as mini-swe-agent's environments have it."""

    def execute(self, command: Any, cwd: str = "", *, timeout: int | None = None) -> Mapping[str, Any]:
        """Run a command; `output` and `returncode`."""
        ...


MakeShell = Callable[[Mapping[str, Any]], Shell]
"""Starts a sandbox from `environment_class`, `image`, `cwd` and `timeout`; may take minutes. Runs in a thread."""


@dataclass(frozen=True, slots=True)
class RepairArguments:
    """Arguments of the environment `repair`. Raises `EnvironmentSettingsError`."""

    tasks: str = ""
    """JSON lines with `instance_id`, `image`, `problem_statement`, `evaluation` (a shell script), and optionally
    `must_pass`, tests that the evaluation must report as passed; without it the script's exit code decides."""
    sandbox: str = "docker"
    """Sandbox of mini-swe-agent: docker, singularity, swerex_modal, … or the full name of a class."""
    folder: str = "/testbed"
    """The repository in the image."""
    turns: int = 50
    """Commands until the episode ends and what is there is evaluated."""
    command_s: int = 60
    """Limit of one command, seconds."""
    evaluation_s: int = 900
    """Limit of the evaluation, seconds."""
    output_characters: int = 8000
    """Most characters of a command's output that the agent sees: beginning and end."""
    parallel: int = 64
    """Sandboxes that are started or asked at the same time."""

    def __post_init__(self) -> None:
        for key, low in (
            ("turns", 1),
            ("command_s", 1),
            ("evaluation_s", 1),
            ("output_characters", 100),
            ("parallel", 1),
        ):
            if getattr(self, key) < low:
                raise EnvironmentSettingsError(f"repair: {key} = {getattr(self, key)}; use {low} or more")
        if not self.tasks:
            raise EnvironmentSettingsError("repair: tasks is empty; name a file of JSON lines, one task each")


def read_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file. Raises `EnvironmentSettingsError` with file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentSettingsError(f"repair: tasks = {path}: cannot be read: {error}") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EnvironmentSettingsError(f"{path}:{number}: is no JSON: {error}") from None
        missing = [name for name in _FIELDS if not isinstance(row, dict) or not isinstance(row.get(name), str)]
        if missing:
            raise EnvironmentSettingsError(f"{path}:{number}: a task needs the text {missing[0]!r}")
        tasks.append(Task(id=row["instance_id"], seed=number, payload=row))
    if not tasks:
        raise EnvironmentSettingsError(f"{path}: holds no task")
    return tuple(tasks)


class RepairEnvironment:
    """One episode in one sandbox."""

    def __init__(self, arguments: RepairArguments, make: MakeShell, threads: ThreadPoolExecutor) -> None:
        self._arguments = arguments
        self._make = make
        self._threads = threads
        self._shell: Shell | None = None
        self._task: Task | None = None
        self._used = 0
        self._mistakes = 0

    async def reset(self, task: Task) -> Observation:
        """Start the sandbox and state the problem. Raises `EnvironmentFailure`."""
        given = self._arguments
        config = {
            "environment_class": given.sandbox,
            "image": task.payload["image"],
            "cwd": given.folder,
            "timeout": given.command_s,
        }
        self._task, self._used, self._mistakes = task, 0, 0
        self._shell = await self._in_thread(lambda: self._make(config), f"task {task.id}: the sandbox does not start")
        return Observation((Message("system", _SYSTEM), Message("user", str(task.payload["problem_statement"]))))

    async def step(self, action: str) -> StepResult:
        """Run the command, or evaluate. Raises `EnvironmentFailure`."""
        if self._shell is None or self._task is None:
            raise RuntimeError("step before reset")
        self._used += 1
        blocks = COMMAND.findall(action)
        command = blocks[0].strip() if len(blocks) == 1 else ""
        if not command:
            self._mistakes += 1
            seen = f"Expected exactly one block ```bash … ```, found {len(blocks)}."
        elif command == SUBMIT:
            return await self._evaluated("submitted")
        else:
            output, code = await self._run(command, self._arguments.command_s)
            seen = f"exit code {code}\n{shortened(output, self._arguments.output_characters)}"
        if self._used >= self._arguments.turns:
            return await self._evaluated("no more turns")
        return StepResult(observe(seen), 0.0, False, self._info(None))

    async def close(self) -> None:
        """Remove the sandbox."""
        shell, self._shell = self._shell, None
        cleanup = getattr(shell, "cleanup", None)
        if cleanup is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, cleanup)

    async def _evaluated(self, why: str) -> StepResult:
        assert self._task is not None
        payload = self._task.payload
        output, code = await self._run(str(payload["evaluation"]), self._arguments.evaluation_s)
        solved = judged(output, code, payload.get("must_pass"))
        return StepResult(observe(why), float(solved), True, self._info(solved))

    def _info(self, solved: bool | None) -> dict[str, Any]:
        info: dict[str, Any] = {"commands": self._used, "mistakes": self._mistakes}
        return info if solved is None else {**info, "solved": solved}

    async def _run(self, command: str, limit_s: int) -> tuple[str, int]:
        """Output and exit code; a command that takes too long is the agent's, a sandbox that is gone is not."""
        shell, task = self._shell, self._task
        assert shell is not None
        assert task is not None

        def execute() -> Mapping[str, Any]:
            # The sandbox's own limit ends a command inside it; what it raises then is no failure of the sandbox.
            try:
                return shell.execute(_as_asked(shell, command), timeout=limit_s)
            except TimeoutError:
                return {"output": f"not finished after {limit_s} s", "returncode": 124}
            except Exception as error:
                if type(error).__name__ == "TimeoutExpired":
                    return {"output": f"not finished after {limit_s} s", "returncode": 124}
                raise

        answer = await self._in_thread(execute, f"task {task.id}: the sandbox does not answer")
        return str(answer.get("output", "")), int(answer.get("returncode", 1))

    async def _in_thread(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except Exception as error:
            raise EnvironmentFailure(f"{what}: {type(error).__name__}: {error}") from error


def _as_asked(shell: Shell, command: str) -> Any:
    """The command as this version of the sandbox takes it: a text, or since version 2 an action that holds one."""
    first = next(iter(inspect.signature(shell.execute).parameters), "")
    return {"command": command} if first == "action" else command


def judged(output: str, code: int, must_pass: Any) -> bool:
    """Whether an evaluation says that the problem is solved."""
    if not must_pass:
        return code == 0
    passed = {line.split(maxsplit=1)[1].strip() for line in output.splitlines() if line.startswith("PASSED ")}
    passed |= {line.rsplit(" ... ", 1)[0].strip() for line in output.splitlines() if line.rstrip().endswith(" ... ok")}
    return all(str(name) in passed for name in must_pass)


def shortened(text: str, limit: int) -> str:
    """`text`, or its beginning and end with a word on what is left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


class RepairSuite:
    """The environment `repair` with its threads; sandboxes belong to their episodes."""

    name = "repair"

    def __init__(self, arguments: RepairArguments, make: MakeShell | None = None) -> None:
        self._arguments = arguments
        self._tasks = read_tasks(Path(arguments.tasks))
        self._make = make or _mini_swe_shell
        self._threads = ThreadPoolExecutor(arguments.parallel, thread_name_prefix="sandbox")

    @classmethod
    def build(cls, arguments: Mapping[str, Any]) -> "RepairSuite":
        """From settings. Raises `EnvironmentSettingsError`."""
        return cls(read_arguments(RepairArguments, cls.name, arguments))

    def tasks(self, seed: int) -> TaskSource:
        """All tasks, in a new order each time round."""
        return DatasetTasks(self._tasks, seed)

    def environment(self) -> RepairEnvironment:
        """An episode that is yet to be reset."""
        return RepairEnvironment(self._arguments, self._make, self._threads)

    async def start(self) -> None:
        """Refuse where mini-swe-agent is not installed. Raises `EnvironmentSettingsError`."""
        if self._make is _mini_swe_shell:
            _mini_swe()

    async def close(self) -> None:
        """End the threads once they are idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def vocabulary(self) -> Sequence[str]:
        """Empty: the texts are open."""
        return ()

    def demonstrations(self, seed: int, count: int) -> Sequence[Demonstration]:
        """None."""
        del seed, count
        return ()


def _mini_swe() -> Any:
    try:
        return import_module("minisweagent.environments")
    except ImportError as error:
        raise EnvironmentSettingsError(
            f"repair: needs mini-swe-agent, not installed here ({error}); run `uv pip install mini-swe-agent`"
        ) from error


def _mini_swe_shell(config: Mapping[str, Any]) -> Shell:
    shell: Shell = _mini_swe().get_environment(dict(config))
    return shell
