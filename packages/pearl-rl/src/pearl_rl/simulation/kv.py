"""The KV budget of one simulated engine: sequences in hand, and kept prefixes that give way, oldest first.

Like a radix cache over whole conversations: one entry for each conversation, and below it the root that several
conversations share (the task's first prompt), which is held once. Where a prompt leaves the path of the one before it
(a history that was edited, reasoning that was dropped), a radix cache keeps the rest of the old path too: nobody will
ask for it again, but the cache cannot know, and holds it until its turn to give way comes.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Root:
    """A shared beginning; alive while somebody uses it."""

    name: str
    tokens: int
    users: int = 0
    """Sequences in hand and kept prefixes that begin with it."""
    holds: int = 0
    """Sequences in hand among them."""


@dataclass(slots=True)
class _Entry:
    tokens: int
    """Beyond the root."""
    root: Root | None
    """None also for the rest of a path that its conversation left."""
    conversation: str
    """Whose newest path it is; empty for one that was left."""


@dataclass(slots=True, eq=False)
class Hold:
    """What one sequence in hand occupies."""

    tokens: int = 0
    """Beyond the root."""
    root: Root | None = None
    epoch: int = 0
    """Weights under which it began; what older weights computed is not kept."""

    @property
    def context_tokens(self) -> int:
        """All tokens whose KV it has or will have."""
        return self.tokens + (self.root.tokens if self.root else 0)


class KvPool:
    """Token-exact accounting. Never exceeds `capacity`: `used` = in hand + kept + roots."""

    def __init__(self, capacity: int, *, keeps_left_paths: bool = False) -> None:
        """`keeps_left_paths`: whether what a conversation left of its old path stays until it must give way."""
        if capacity < 1:
            raise ValueError(f"a KV budget of {capacity} tokens: must be at least 1")
        self.capacity = capacity
        self._keeps_left_paths = keeps_left_paths
        self.version = 0
        """Of the weights that compute what it holds."""
        self.pinned = 0
        """Tokens of sequences in hand, without roots."""
        self.kept = 0
        """Tokens of kept prefixes, without roots."""
        self.root_tokens = 0
        self.held_roots = 0
        """Tokens of roots that a sequence in hand begins with."""
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        """Kept paths by number, the one longest unused first."""
        self._newest: dict[str, int] = {}
        """Conversation → number of its newest path."""
        self._numbers = 0
        self._roots: dict[str, Root] = {}
        self._epoch = 0
        self.evicted_tokens = 0

    @property
    def used(self) -> int:
        """Tokens that are occupied."""
        return self.pinned + self.kept + self.root_tokens

    @property
    def attainable(self) -> int:
        """Tokens that sequences in hand could still take if every kept prefix gave way."""
        return self.capacity - self.pinned - self.held_roots

    def match(self, conversation: str, root: str, prompt_tokens: int, reusable: int) -> int:
        """Tokens of a prompt that are here: its conversation's, else its root's; never the last token."""
        entry = self._entry(conversation)
        if entry is not None:
            found = entry.tokens + (entry.root.tokens if entry.root else 0)
        else:
            shared = self._roots.get(root) if root else None
            found = shared.tokens if shared else 0
        return max(0, min(found, reusable, prompt_tokens - 1))

    def room_for(self, conversation: str, root: str, root_tokens: int, prompt_tokens: int) -> int:
        """By how much `attainable` exceeds what this prompt would take (negative: it does not fit)."""
        entry = self._entry(conversation)
        shared = entry.root if entry is not None else self._roots.get(root)
        if shared is None:
            return self.attainable - max(prompt_tokens, root_tokens)
        held = shared.tokens if shared.holds else 0
        return self.attainable - (prompt_tokens - held)

    def take(self, conversation: str, root: str, root_tokens: int, prompt_tokens: int, found: int = 1 << 60) -> Hold:
        """Occupy a whole prompt; what it has in common with its conversation's kept path, `found` tokens of it, goes
        over into the hold, the rest of that path stays as it is, and room is made for the rest of the prompt.
        """
        entry = self._entry(conversation)
        if entry is not None:
            shared = entry.root
            self._leave_path(conversation, entry, max(0, found - (shared.tokens if shared else 0)))
        else:
            shared = self._share(root, root_tokens)
        own = prompt_tokens
        if shared is not None:
            own -= shared.tokens
            shared.holds += 1
            if shared.holds == 1:
                self.held_roots += shared.tokens
        self.pinned += own
        self._make_room()
        return Hold(tokens=own, root=shared, epoch=self._epoch)

    def _entry(self, conversation: str) -> _Entry | None:
        number = self._newest.get(conversation)
        return None if number is None else self._entries[number]

    def _leave_path(self, conversation: str, entry: _Entry, common: int) -> None:
        """A conversation goes on from the first `common` tokens (beyond the root) of its kept path."""
        number = self._newest.pop(conversation)
        common = min(common, entry.tokens) if self._keeps_left_paths else entry.tokens
        self.kept -= common
        entry.tokens -= common
        # Its use of the root goes over to the hold.
        entry.root, entry.conversation = None, ""
        if not entry.tokens:
            del self._entries[number]

    def _share(self, name: str, tokens: int) -> Root | None:
        if not name or tokens <= 0:
            return None
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Root(name, tokens)
            self.root_tokens += tokens
        root.users += 1
        return root

    def grow(self, tokens: int) -> None:
        """Sequences in hand grew by `tokens` in all; their holds are settled when they end."""
        self.pinned += tokens
        self._make_room()

    def drop(self, hold: Hold) -> None:
        """Free what a sequence occupied."""
        self._let_go(hold)
        self._leave(hold.root)

    def current(self, hold: Hold) -> bool:
        """Whether what a sequence occupies was computed under the weights of now."""
        return hold.epoch == self._epoch

    def load(self, conversation: str, root: str, found: int, most: int) -> int:
        """Tokens of a prompt that are here once what is stored elsewhere is loaded, `found` without it."""
        del conversation, root, most
        return found

    def loading_s(self) -> float:
        """What that loading takes, of all prompts since the last call, seconds."""
        return 0.0

    def computed(self, root: str, tokens: int) -> None:
        """The first `tokens` of a prompt that others share are computed."""

    def keep(self, conversation: str, hold: Hold, tokens: int) -> None:
        """Keep the first `tokens` of what a sequence occupied for its conversation's next turn, free the rest."""
        root = hold.root
        own = min(hold.tokens, tokens - (root.tokens if root else 0))
        if not conversation or own <= 0 or not self.current(hold):
            self.drop(hold)
            return
        self._let_go(hold)
        if (before := self._newest.get(conversation)) is not None:
            self._forget(before)
        self._numbers += 1
        self._entries[self._numbers] = _Entry(own, root, conversation)
        self._newest[conversation] = self._numbers
        self.kept += own

    def _let_go(self, hold: Hold) -> None:
        self.pinned -= hold.tokens
        root = hold.root
        if root is not None:
            root.holds -= 1
            if root.holds == 0:
                self.held_roots -= root.tokens

    def forget_all(self) -> None:
        """Void everything kept: the weights changed."""
        while self._entries:
            self._forget(next(iter(self._entries)))
        self._roots = {}
        self._epoch += 1

    def evict(self, tokens: int) -> None:
        """Free at least `tokens` of kept prefixes, or all: the ends of those longest unused first."""
        while tokens > 0 and self._entries:
            number, entry = next(iter(self._entries.items()))
            if entry.tokens > tokens:
                entry.tokens -= tokens
                self.kept -= tokens
                self.evicted_tokens += tokens
                return
            tokens -= entry.tokens
            before = self.root_tokens
            self.evicted_tokens += entry.tokens
            self._forget(number)
            tokens -= before - self.root_tokens

    def _make_room(self) -> None:
        excess = self.pinned + self.kept + self.root_tokens - self.capacity
        if excess > 0:
            self.evict(excess)

    def _forget(self, number: int) -> None:
        entry = self._entries.pop(number)
        if entry.conversation:
            del self._newest[entry.conversation]
        self.kept -= entry.tokens
        self._leave(entry.root)

    def _leave(self, root: Root | None) -> None:
        if root is None:
            return
        root.users -= 1
        if root.users == 0:
            self.root_tokens -= root.tokens
            if self._roots.get(root.name) is root:
                del self._roots[root.name]
