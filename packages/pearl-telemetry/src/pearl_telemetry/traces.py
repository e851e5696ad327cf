"""Traces of a run: one a trajectory with its turns, one a training step, one a reconfiguration with its actions.

Spans are written when what they describe is over, with the times that were measured: nothing is on the path of a
request. Names and attributes follow OpenTelemetry's GenAI conventions where these exist, and `pearl.*` elsewhere.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span as OpenSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from pearl_state import effects, events
from pearl_state.plan import PlanId
from pearl_state.trajectory import Trajectory, Turn
from pearl_state.worker import WorkerId
from pearl_telemetry.context import ChosenIds, SpanIds, TraceKeys
from pearl_telemetry.instruments import SCOPE, StepFigures, Value
from pearl_telemetry.metrics import SPANS, Span

_NS = 1_000_000_000
_LARGEST_PENDING = 100_000
_Key = tuple[str, PlanId | int]
"""A reconfiguration that is under way: what it is, and its plan."""


@dataclass(slots=True)
class _Open:
    """A reconfiguration that is under way."""

    name: str
    began_s: float
    workers: frozenset[WorkerId]
    ids: SpanIds
    training: bool = False
    actions: list[tuple[str, float, float, str | None, WorkerId | None]] = field(
        default_factory=list[tuple[str, float, float, str | None, WorkerId | None]]
    )


@dataclass(slots=True)
class _Served:
    """What the requests of one turn say beyond the turn itself."""

    workers: list[int] = field(default_factory=list[int])
    """Who decoded, in order."""
    prefill: list[int] = field(default_factory=list[int])
    """Who prefilled, where that was another worker."""
    transfer_s: float = 0.0


class RunTraces:
    """Turns what a run records into spans. It observes: it never answers, and never raises for a value.

    Times come on the run's clock; `epoch_s` is the wall-clock time at which that clock was 0. `keys` name spans before
    they are written, and `ids` lets the SDK give them these names.
    """

    def __init__(
        self,
        *,
        epoch_s: float,
        model: str = "",
        tracer_provider: trace.TracerProvider | None = None,
        keys: TraceKeys | None = None,
        ids: ChosenIds | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        self._epoch_s = epoch_s
        self._model = model
        self._keys = keys or TraceKeys("")
        self._ids = ids
        self._open: dict[_Key, _Open] = {}
        self._served: OrderedDict[str, _Served] = OrderedDict()

    # ---- trajectories -----------------------------------------------------------------------------------------------

    def on_request(self, rid: str, worker: int, prefill: int | None, transfer_s: float) -> None:
        """A request ended: `rid` is trajectory, turn and attempt, joined by dots; seconds of its KV hand-over."""
        turn = rid.rpartition(".")[0]
        served = self._served.get(turn)
        if served is None:
            if len(self._served) >= _LARGEST_PENDING:
                # Of trajectories that were never trained on.
                self._served.popitem(last=False)
            served = self._served[turn] = _Served()
        served.workers.append(worker)
        served.transfer_s += transfer_s
        if prefill is not None:
            served.prefill.append(prefill)

    def on_trajectory(self, trajectory: Trajectory, step: int) -> None:
        """One trace: the agent's run, its turns, and in each what the time went to."""
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": trajectory.id,
            "pearl.group": trajectory.group,
            "pearl.step": step,
            "pearl.reward": trajectory.reward,
            "pearl.dispatch_version": trajectory.dispatch_version,
            "gen_ai.usage.output_tokens": trajectory.response_tokens,
        }
        ids = self._keys.trajectory(trajectory.id)
        root = self._begin(SPANS.trajectory, trajectory.started_s, None, attributes, ids=ids)
        context = 0
        for index, turn in enumerate(trajectory.turns):
            context += len(turn.prompt)
            about: dict[str, Value] = {
                "pearl.turn": index,
                "pearl.step": step,
                "pearl.last": index + 1 == len(trajectory.turns),
            }
            ids = self._keys.turn(trajectory.id, index)
            served = self._served.pop(f"{trajectory.id}.{index:04d}", _NOBODY)
            self._turn(self._begin(SPANS.turn, turn.started_s, root, about, ids=ids), turn, context, served)
            context += len(turn.response) if turn.retained_tokens is None else turn.retained_tokens
        self._end(root, trajectory.finished_s)

    def _turn(self, span: OpenSpan, turn: Turn, context: int, served: _Served) -> None:
        """What the time of one turn went to, in spans below `span`, which it ends."""
        at_s = turn.started_s
        prompt: dict[str, Value] = {"pearl.new_prompt_tokens": len(turn.prompt)}
        for kind, seconds, who in (
            (SPANS.queue, turn.queue_s, []),
            (SPANS.prefill, turn.prefill_s, served.prefill or served.workers),
        ):
            if seconds > 0:
                self._whole(kind, at_s, at_s + seconds, span, {**prompt, **_workers(who)})
            at_s += max(0.0, seconds)
        # What is left in between are waits that nobody measured; the hand-over comes last.
        decode_began_s = max(at_s, turn.finished_s - turn.decode_s)
        moved_s = min(served.transfer_s, decode_began_s - at_s)
        if moved_s > 0:
            self._whole(SPANS.transfer, decode_began_s - moved_s, decode_began_s, span, _workers(served.prefill))
        retained = len(turn.response) if turn.retained_tokens is None else turn.retained_tokens
        generation: dict[str, Value] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": context,
            "gen_ai.usage.output_tokens": len(turn.response),
            "pearl.new_prompt_tokens": len(turn.prompt),
            "pearl.retained_tokens": retained,
            "pearl.prefill_s": turn.prefill_s,
            "pearl.queue_s": turn.queue_s,
            "pearl.interruptions": turn.interruptions,
            **_workers(served.workers),
            "pearl.weight_versions": ",".join(str(part.version) for part in turn.spans),
        }
        if self._model:
            generation["gen_ai.request.model"] = self._model
        self._whole(SPANS.decode, decode_began_s, turn.finished_s, span, generation, kind=SpanKind.CLIENT)
        if turn.environment_s > 0:
            ended_s = turn.finished_s + turn.environment_s
            self._whole(SPANS.environment, turn.finished_s, ended_s, span, {"gen_ai.operation.name": "execute_tool"})
        self._end(span, turn.finished_s + turn.environment_s)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def on_step(self, record: StepFigures, now_s: float, step: int) -> None:
        """One trace: the step, its rollout, and its update. `now_s` is when it ended."""
        attributes: dict[str, Value] = {
            "pearl.step": step,
            "pearl.reward": record.reward_mean,
            "pearl.trajectories": record.trajectories,
            "pearl.borrowed": record.borrowed,
        }
        root = self._begin(SPANS.step, now_s - record.duration_s, None, attributes)
        trained_s = now_s - record.training_s
        rolled_s = trained_s - record.wait_grant_s
        self._whole(SPANS.rollout, rolled_s - record.rollout_s, rolled_s, root, {"pearl.step": step})
        self._whole(SPANS.training, trained_s, now_s, root, {"pearl.step": step})
        self._end(root, now_s)

    # ---- reconfigurations -------------------------------------------------------------------------------------------

    def on_control(self, event: events.Event, emitted: Iterable[effects.Effect]) -> None:
        """One step of the control plane: closes what `event` answers, opens what it emitted."""
        self._answered(event)
        for effect in emitted:
            self._started(effect, event.now_s)

    def _started(self, effect: effects.Effect, now_s: float) -> None:
        key, name, workers = _about(effect)
        if key is not None:
            self._open[key] = _Open(name, now_s, workers, self._keys.fresh(), training=key[0] in _OF_TRAINING)

    def context(self, effect: effects.Effect) -> str:
        """The `traceparent` of the reconfiguration that `effect` began; empty for one that is none."""
        one = self._open.get(key) if (key := _about(effect)[0]) is not None else None
        return "" if one is None else one.ids.traceparent

    def _answered(self, event: events.Event) -> None:
        match event:
            case events.GroupPrepared():
                self._close(("group", event.plan_id), event.now_s, {})
            case events.GroupFailed():
                failed = event.failed or {WorkerId(-1): "cancelled"}
                self._close(("group", event.plan_id), event.now_s, failed)
            case events.StageApplied():
                self._close(("stage", event.plan_id), event.now_s, event.failed)
            case events.TrainingReleased():
                self._close(("release", event.plan_id), event.now_s, _cause(event.failed))
            case events.TrainingResumed():
                self._close(("resume", 0), event.now_s, _cause(event.failed))
            case _:
                return

    def on_action(
        self, name: str, worker: WorkerId | None, started_s: float, duration_s: float, failed: str | None
    ) -> None:
        """A finished call on a worker (None: on training) becomes a child of the reconfiguration that it is part of."""
        for one in self._open.values():
            if (worker is None and one.training) or (worker is not None and worker in one.workers):
                one.actions.append((name, started_s, duration_s, failed, worker))
                return

    def _close(self, key: _Key, now_s: float, failed: Mapping[WorkerId, str]) -> None:
        one = self._open.pop(key, None)
        if one is None:
            return
        attributes: dict[str, Value] = {"pearl.plan": int(key[1]), "pearl.workers": len(one.workers)}
        attributes["pearl.effect"] = one.name
        root = self._begin(SPANS.reconfiguration, one.began_s, None, attributes, ids=one.ids)
        for name, started_s, duration_s, cause, worker in one.actions:
            about: dict[str, Value] = {"pearl.action": name}
            if worker is not None:
                about["pearl.worker"] = int(worker)
            self._whole(SPANS.action, started_s, started_s + duration_s, root, about, failed=cause)
        if failed:
            root.set_status(Status(StatusCode.ERROR, "; ".join(sorted(set(failed.values())))[:200]))
        self._end(root, now_s)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _whole(
        self,
        span: Span,
        began_s: float,
        ended_s: float,
        parent: OpenSpan,
        attributes: Mapping[str, Value],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        failed: str | None = None,
    ) -> None:
        one = self._begin(span, began_s, parent, attributes, kind)
        if failed is not None:
            one.set_status(Status(StatusCode.ERROR, failed[:200]))
        self._end(one, ended_s)

    def _begin(
        self,
        span: Span,
        at_s: float,
        parent: OpenSpan | None,
        attributes: Mapping[str, Value],
        kind: SpanKind = SpanKind.INTERNAL,
        ids: SpanIds | None = None,
    ) -> OpenSpan:
        if ids is not None and self._ids is not None:
            self._ids.choose(ids)
        # An empty context: what happens to be current in the process is not the parent of something long past.
        context = Context() if parent is None else set_span_in_context(parent)
        return self._tracer.start_span(
            span.name, context=context, kind=kind, attributes=attributes, start_time=self._ns(at_s)
        )

    def _end(self, span: OpenSpan, at_s: float) -> None:
        span.end(end_time=self._ns(at_s))

    def _ns(self, at_s: float) -> int:
        return int((self._epoch_s + at_s) * _NS)


_OF_TRAINING = frozenset({"release", "resume"})


def _about(effect: effects.Effect) -> tuple[_Key | None, str, frozenset[WorkerId]]:
    """Key, name and workers of the reconfiguration that an effect begins; no key where it begins none."""
    match effect:
        case effects.PrepareGroup():
            workers = frozenset(worker.id for worker in effect.workers)
            return ("group", effect.plan_id), f"prepare {effect.kind}", workers
        case effects.ApplyStage():
            named = [worker.id for worker in (*effect.leave, *effect.admit)]
            return ("stage", effect.plan_id), "apply stage", frozenset([*named, *effect.switch])
        case effects.ReleaseTraining():
            return ("release", effect.plan_id), "release training", frozenset()
        case effects.ResumeTraining():
            return ("resume", 0), "resume training", frozenset()
        case _:
            return None, "", frozenset()


_NOBODY = _Served()


def _workers(ids: Sequence[int]) -> Mapping[str, Value]:
    """Who served, as an attribute."""
    return {"pearl.workers": ",".join(map(str, ids))} if ids else {}


def _cause(failed: str | None) -> Mapping[WorkerId, str]:
    return {} if failed is None else {WorkerId(-1): failed}
