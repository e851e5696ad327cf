"""From the events of a streamed answer to tokens, logprobs and weight versions. Pure.

SGLang sends what is new in each event (incremental streaming). The event of a request that is aborted in a queue
repeats the last token: `completion_tokens` says how many there are, and decides.
"""

from dataclasses import dataclass, field
from typing import Any

from pearl_executor.ports import Finish, TokenChunk
from pearl_state.errors import StateError
from pearl_state.trajectory import WeightSpan, merge_spans


class AnswerError(ValueError):
    """An answer that contradicts itself."""


@dataclass(slots=True)
class Answer:
    """What one server answered so far."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[WeightSpan] = field(default_factory=list[WeightSpan])
    finish: Finish | None = None
    failure: str = ""
    """Why the server ended the request, where that was its own doing and no abort."""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add(self, event: dict[str, Any]) -> TokenChunk | None:
        """Take one event in. Returns the new tokens, if it brought any. Raises `AnswerError`."""
        if "error" in event:
            error = event["error"]
            self.failure = str(error.get("message", error)) if isinstance(error, dict) else str(error)
            return None
        try:
            return self._add(event["meta_info"], event.get("output_ids") or [])
        except (KeyError, TypeError, ValueError, StateError) as error:
            raise AnswerError(f"an event cannot be understood ({error!r}): {str(event)[:200]}") from error

    def _add(self, meta: dict[str, Any], tokens: list[int]) -> TokenChunk | None:
        chunk = self._new(meta, [int(token) for token in tokens])
        self.cached_tokens = int(meta.get("cached_tokens") or 0)
        self.prompt_tokens = int(meta.get("prompt_tokens") or 0)
        self.queue_s = float(meta.get("queue_time") or 0.0)
        if meta.get("forward_entry_time") and meta.get("prefill_finished_time"):
            self.prefill_s = max(0.0, float(meta["prefill_finished_time"]) - float(meta["forward_entry_time"]))
        self.first_token_s = float(meta.get("first_token_latency") or 0.0)
        self.total_s = float(meta.get("e2e_latency") or 0.0)
        if meta.get("finish_reason"):
            self._end(meta["finish_reason"])
            if meta.get("weight_versions"):
                self.spans = self._exact(meta["weight_versions"])
        return chunk

    def _new(self, meta: dict[str, Any], tokens: list[int]) -> TokenChunk | None:
        total = int(meta.get("completion_tokens", len(self.tokens) + len(tokens)))
        missing = total - len(self.tokens)
        # Only the last `missing` of what came are new; more may be missing than came where an event was lost.
        fresh = tokens[len(tokens) - missing :] if 0 < missing <= len(tokens) else []
        if missing > len(tokens):
            raise AnswerError(f"{missing - len(tokens)} tokens were never sent")
        if not fresh:
            return None
        entries = meta.get("output_token_logprobs") or []
        if len(entries) < len(fresh):
            raise AnswerError(f"{len(fresh)} tokens with {len(entries)} logprobs")
        entries = entries[-len(fresh) :]
        if [int(entry[1]) for entry in entries] != fresh:
            raise AnswerError("logprobs are of other tokens")
        version = int(meta["weight_version"])
        if self.spans:
            # An event names the version in force when it is handed on, so tokens drawn just before an update may come
            # under the new one, and the last event under the old one again: it alone is exact, and corrects the others.
            version = max(version, self.spans[-1].version)
        chunk = TokenChunk(tuple(fresh), tuple(float(entry[0]) for entry in entries), version, len(self.tokens))
        self.tokens += fresh
        self.logprobs += chunk.logprobs
        self.spans = [*merge_spans([*self.spans, WeightSpan(version, len(fresh))])]
        return chunk

    def _end(self, reason: dict[str, Any]) -> None:
        kind = reason["type"]
        if kind == "abort":
            self.finish = Finish.INTERRUPTED
            if reason.get("status_code"):
                self.failure = f"{reason['status_code']}: {reason.get('message', 'no message')}"
        else:
            self.finish = Finish.LENGTH if kind == "length" else Finish.STOP

    def _exact(self, entries: list[Any]) -> list[WeightSpan]:
        """The server's own account of which version drew which tokens."""
        spans: list[WeightSpan] = []
        at = 0
        for entry in entries:
            version, start, end = (entry["version"], entry["start"], entry["end"]) if isinstance(entry, dict) else entry
            if start != at or end < start:
                raise AnswerError(f"weight versions leave a gap or overlap: {entries}")
            spans.append(WeightSpan(int(version), end - start))
            at = end
        if at != len(self.tokens):
            # An abort may cut the record short or count a token that was not sent; the events' own versions stand.
            return self.spans
        return [*merge_spans(spans)]
