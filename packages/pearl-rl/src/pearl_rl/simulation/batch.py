"""The sequences in decode of one simulated engine."""

import heapq

from pearl_rl.simulation.requests import EngineRequest, Stage


class DecodeBatch:
    """Members generate one token each an iteration; what each has follows from the iterations since it joined."""

    __slots__ = ("_ends", "_order", "contexts", "iteration", "members")

    def __init__(self) -> None:
        self.members: dict[EngineRequest, None] = {}
        self.contexts = 0
        """Sum of all contexts, tokens."""
        self.iteration = 0
        """Iterations so far."""
        self._ends: list[tuple[int, int, EngineRequest]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self.members)

    @property
    def mean_context_tokens(self) -> float:
        """Mean context of its members; it must have some."""
        return self.contexts / len(self.members)

    def generated(self, request: EngineRequest) -> int:
        """Tokens that a request has, member or not."""
        if request.stage is Stage.RUNNING:
            return min(request.new_tokens, request.generated + self.iteration - request.joined_at)
        return request.generated

    def enter(self, request: EngineRequest) -> None:
        """Decode `request` from the next iteration on."""
        request.stage = Stage.RUNNING
        request.joined_at = self.iteration
        self.members[request] = None
        self.contexts += request.context_tokens
        request.entry = self._order = self._order + 1
        heapq.heappush(self._ends, (self.iteration + request.new_tokens - request.generated, self._order, request))

    def leave(self, request: EngineRequest) -> None:
        """Take a member out; what it generated is settled in it and in what it occupies."""
        del self.members[request]
        request.entry = 0
        grown = self.generated(request) - request.generated
        self.contexts -= request.context_tokens + grown
        request.generated += grown
        if request.hold is not None:
            request.hold.tokens += grown

    def pass_iterations(self, count: int) -> int:
        """Every member generated `count` tokens. Returns how many tokens that is."""
        tokens = count * len(self.members)
        self.iteration += count
        self.contexts += tokens
        return tokens

    def until_next_end(self) -> int:
        """Iterations until the first member has all its tokens; it must have some."""
        return self._first()[0] - self.iteration

    def ended(self) -> EngineRequest | None:
        """A member that has all its tokens, taken out; None where there is none."""
        if not self.members:
            return None
        end, _, request = self._first()
        if end > self.iteration:
            return None
        self.leave(request)
        return request

    def _first(self) -> tuple[int, int, EngineRequest]:
        ends = self._ends
        # One that left has no entry, and one that came again another one.
        while (first := ends[0])[1] != first[2].entry:
            heapq.heappop(ends)
        return first
