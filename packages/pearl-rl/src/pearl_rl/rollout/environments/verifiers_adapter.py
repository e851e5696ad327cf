"""Any single-agent environment of `verifiers` (0.4 or later, its stack `verifiers.v1`).

A verifiers environment drives the model itself, through a harness that talks to a chat endpoint. It gets ours: each of
its model calls becomes an observation, and what the agent writes becomes the answer (`program_environment`). Tasks,
tools, runtimes and rewards stay verifiers' own.
"""

import importlib
import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from pearl_rl.rollout.environments.arguments import read_arguments, read_options
from pearl_rl.rollout.environments.chat_endpoint import ChatEndpoint, ChatRefusal, ChatRequest
from pearl_rl.rollout.environments.program_environment import ProgramEnvironment, ProgramOutcome
from pearl_rl.rollout.environments.protocol import (
    Demonstration,
    EnvironmentFailure,
    EnvironmentSettingsError,
    Task,
    TaskSource,
)
from pearl_rl.rollout.environments.task_sources import DatasetTasks


@dataclass(frozen=True, slots=True)
class VerifiersArguments:
    """Arguments of the environment `verifiers`."""

    taskset: str
    """Id of an installed taskset, as `vf-eval` takes it."""
    harness: str = "null"
    """Id of the harness that plays it. `null` is plain chat with the task's tools, in a local process. Any other may
    carry out what the model writes, so `options` must name the runtime it runs in (`agent.runtime.type=docker`)."""
    limit: int = 0
    """Tasks to take from the start of the taskset; 0: all of them."""
    options: list[str] = field(default_factory=list)
    """Further settings of verifiers' `[env]` table, each `dotted.key=value`, e.g. `agent.runtime.type=docker`."""


class VerifiersSuite:
    """The environment `verifiers`."""

    name = "verifiers"

    def __init__(self, arguments: VerifiersArguments) -> None:
        self._v1 = _verifiers()
        self._arguments = arguments
        self._environment = self._load(arguments)
        self._sessions: dict[str, ProgramEnvironment] = {}
        self._endpoint = ChatEndpoint(self._answer, key=secrets.token_urlsafe(24))
        self._serving = AsyncExitStack()
        self._context: Any = None

    @classmethod
    def build(cls, arguments: Mapping[str, Any]) -> "VerifiersSuite":
        """From settings. Raises `EnvironmentSettingsError`."""
        if "taskset" not in arguments:
            raise EnvironmentSettingsError(
                "verifiers: the argument `taskset` is missing; give an installed taskset's id"
            )
        return cls(read_arguments(VerifiersArguments, cls.name, arguments))

    def tasks(self, seed: int) -> TaskSource:
        """The taskset's tasks, shuffled anew each time round."""
        taskset = self._environment.taskset
        if not self._arguments.limit and not taskset.bounded:
            raise EnvironmentSettingsError("verifiers: this taskset has no end; set `limit`")
        found = itertools.islice(taskset, self._arguments.limit or None)
        tasks = [Task(f"{number:06d}-{task.key[:12]}", seed, {"task": task}) for number, task in enumerate(found)]
        return DatasetTasks(tasks, seed)

    def environment(self) -> ProgramEnvironment:
        """An episode that is yet to be reset."""
        return ProgramEnvironment(self._play)

    async def start(self) -> None:
        """Open the endpoint and whatever the verifiers environment serves to its episodes."""
        await self._endpoint.start()
        self._serving.push_async_callback(self._endpoint.close)
        try:
            await self._serving.enter_async_context(self._environment.serving())
        except BaseException:
            await self._serving.aclose()
            raise
        client = self._v1.EvalClientConfig(base_url=self._endpoint.url, api_key_var="PEARL_ENDPOINT_NEEDS_NO_KEY")
        self._context = self._v1.ModelContext(model="pearl", client=client)

    async def close(self) -> None:
        """Close what `start` opened."""
        await self._serving.aclose()

    def vocabulary(self) -> Sequence[str]:
        """Empty: the texts are open."""
        return ()

    def demonstrations(self, seed: int, count: int) -> Sequence[Demonstration]:  # noqa: ARG002 (the protocol's)
        """None: the format is the environment's own."""
        return ()

    async def _answer(self, request: ChatRequest) -> Mapping[str, Any]:
        environment = self._sessions.get(request.session)
        if environment is None:
            raise ChatRefusal(404, "no such episode")
        return await environment.answer(request)

    async def _play(self, environment: ProgramEnvironment, task: Task) -> ProgramOutcome:
        if self._context is None:
            raise RuntimeError("the suite is not started")
        traces: list[str] = []

        def minted(trace: Any) -> None:
            traces.append(trace.id)
            self._sessions[trace.id] = environment

        try:
            episode = await self._environment.run_episode(task.payload["task"], self._context, on_trace=minted)
        finally:
            for trace in traces:
                self._sessions.pop(trace, None)
        return outcome(episode)

    def _load(self, arguments: VerifiersArguments) -> Any:
        settings = read_options(self.name, arguments.options)
        settings.setdefault("taskset", {})["id"] = arguments.taskset
        agent = settings.setdefault("agent", {})
        agent.setdefault("harness", {})["id"] = arguments.harness
        if arguments.harness == "null":
            agent.setdefault("runtime", {}).setdefault("type", "subprocess")
        elif "type" not in agent.get("runtime", {}):
            raise EnvironmentSettingsError(
                f"verifiers: the harness {arguments.harness!r} may run what the model writes; say where with an option "
                "agent.runtime.type=docker (or another runtime)"
            )
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        try:
            return loaders.load_environment(loaders.resolve_env_config(settings))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            # pydantic's ValidationError is a ValueError.
            raise EnvironmentSettingsError(f"verifiers: {' '.join(str(error).split())}") from error


def outcome(episode: Any) -> ProgramOutcome:
    """Reward and measures of a finished episode. Raises `EnvironmentFailure` where verifiers could not finish it."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        said = [f"{error.type}: {error.message}" for error in errors]
        raise EnvironmentFailure(f"verifiers could not finish the episode: {'; '.join(said) or 'no reason given'}")
    trace = episode.traces[0]
    measures = {key: float(value) for key, value in trace.metrics.items() if value is not None}
    return ProgramOutcome(float(trace.reward), {**measures, "stop": str(trace.stop_condition or "")})


def _verifiers() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as missing:
        raise EnvironmentSettingsError(
            f"verifiers 0.4 or later is not installed beside pearl-rl ({missing}); install 'verifiers>=0.4'"
        ) from missing
