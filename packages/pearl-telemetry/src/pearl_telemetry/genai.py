"""A workload profile from GenAI spans alone: for frameworks that emit OpenTelemetry traces and nothing else.

Add `TrackerSpanProcessor(tracker)` to the framework's tracer provider. Of each trace it reads the model calls
(`gen_ai.operation.name` = `chat`, `text_completion` or `generate_content`) and tool calls (`execute_tool`) of one agent
run (`invoke_agent`), in the order of their times; those of agents that it asks are turns of its run. When no agent of
the trace is at work any more, its turns go to the Runtime Tracker.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from pearl_state.samples import TurnSample
from pearl_telemetry.tracker import RuntimeTracker

_MODEL_CALLS: Final = frozenset({"chat", "text_completion", "generate_content"})
_AGENT: Final = "invoke_agent"
_LARGEST_PENDING: Final = 10_000
"""Agent runs whose root never ends are forgotten beyond this many, oldest first."""


@dataclass(slots=True)
class _Call:
    began_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    prefill_s: float
    queue_s: float


@dataclass(slots=True)
class _Run:
    calls: list[_Call] = field(default_factory=list[_Call])
    tools_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    agents: set[int] = field(default_factory=set[int])
    """Spans of agents that are at work."""


class TrackerSpanProcessor:
    """An SDK span processor that feeds a `RuntimeTracker`.

    `step_attribute` names the attribute of the root span that holds the training step; without it all runs count to
    the step that `step` says. A model call's prefill time is `gen_ai.server.time_to_first_token` (seconds), if given.
    """

    def __init__(self, tracker: RuntimeTracker, *, step_attribute: str = "pearl.step") -> None:
        self.step = 0
        self._tracker = tracker
        self._step_attribute = step_attribute
        self._runs: OrderedDict[int, _Run] = OrderedDict()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Note an agent that begins; of all else only finished spans count."""
        del parent_context
        if (span.attributes or {}).get("gen_ai.operation.name") == _AGENT:
            context = span.get_span_context()
            self._run(context.trace_id).agents.add(context.span_id)

    def on_end(self, span: Any) -> None:
        """Take in a finished span."""
        attributes = span.attributes or {}
        operation = attributes.get("gen_ai.operation.name")
        context = span.get_span_context()
        trace_id = context.trace_id
        if operation == _AGENT:
            agents = self._run(trace_id).agents
            agents.discard(context.span_id)
            if not agents:
                self._finished(trace_id, attributes)
            return
        began_s, ended_s = span.start_time / 1e9, span.end_time / 1e9
        if operation in _MODEL_CALLS:
            first_s = _number(attributes, "gen_ai.server.time_to_first_token")
            self._run(trace_id).calls.append(
                _Call(
                    # Our own spans hold the decode alone; another's holds the whole call, its first token included.
                    began_s=began_s + min(first_s, ended_s - began_s),
                    ended_s=ended_s,
                    input_tokens=int(_number(attributes, "gen_ai.usage.input_tokens")),
                    output_tokens=int(_number(attributes, "gen_ai.usage.output_tokens")),
                    prefill_s=first_s or _number(attributes, "pearl.prefill_s"),
                    queue_s=_number(attributes, "pearl.queue_s"),
                )
            )
        elif operation == "execute_tool":
            self._run(trace_id).tools_s.append((began_s, ended_s))

    def shutdown(self) -> None:
        """Forget runs that never ended."""
        self._runs.clear()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
        """Nothing is kept back."""
        return True

    def _on_ending(self, span: Any) -> None:
        """Nothing: the SDK calls this before a span becomes immutable."""

    def _run(self, trace_id: int) -> _Run:
        if trace_id not in self._runs and len(self._runs) >= _LARGEST_PENDING:
            self._runs.popitem(last=False)
        return self._runs.setdefault(trace_id, _Run())

    def _finished(self, trace_id: int, attributes: Any) -> None:
        run = self._runs.pop(trace_id, None)
        if run is None or not run.calls:
            return
        step = attributes.get(self._step_attribute)
        number = step if isinstance(step, int) else self.step
        self._tracker.observe_turns(turns_of(run.calls, run.tools_s, number))


def turns_of(calls: list[_Call], tools_s: list[tuple[float, float]], step: int) -> list[TurnSample]:
    """The turns of one run. What a call's input has beyond the whole context before it is new."""
    calls = sorted(calls, key=lambda call: call.began_s)
    turns, context = [], 0
    for index, call in enumerate(calls):
        last = index + 1 == len(calls)
        until_s = float("inf") if last else calls[index + 1].began_s
        pause = sum(end - begin for begin, end in tools_s if call.began_s <= begin < until_s)
        whole = max(call.input_tokens, 0)
        kept = 0 if last else max(0, min(call.output_tokens, calls[index + 1].input_tokens - whole))
        turns.append(
            TurnSample(
                step=step,
                turn=index,
                new_prompt_tokens=max(0, whole - context),
                response_tokens=call.output_tokens,
                retained_tokens=kept,
                context_tokens=whole,
                prefill_s=call.prefill_s,
                decode_s=max(0.0, call.ended_s - call.began_s),
                queue_s=call.queue_s,
                environment_s=max(0.0, pause),
                last=last,
            )
        )
        context = whole + kept
    return turns


def _number(attributes: Any, name: str) -> float:
    value = attributes.get(name, 0.0)
    # Another's spans may hold anything, and whoever ends a span must not hear of it.
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else 0.0
