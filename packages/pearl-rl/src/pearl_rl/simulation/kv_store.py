"""KV of conversations in storage that all workers of a cluster share: what one computed, another one loads.

Prorsa (appendix C) persists the KV of whatever a role switch cancels, so that nobody computes it again. Writing goes on
beside the engines' work and costs them nothing; reading takes an engine as long as its links need for the bytes.
"""

from typing import Final

from pearl_rl.simulation.kv import Hold, KvPool

_VERSIONS: Final = 2
"""Newest weights whose KV is there: workers take new weights one after the other."""


class KvStore:
    """The longest known beginning of each conversation, by weight version. Without bound: storage is cheap."""

    def __init__(self, seconds_per_token: float) -> None:
        """`seconds_per_token`: what loading one token's KV takes one worker."""
        if not seconds_per_token >= 0.0:
            raise ValueError(f"KV store: {seconds_per_token} s a token must be a number of at least 0")
        self.seconds_per_token = seconds_per_token
        self._known: dict[int, dict[str, int]] = {}

    def put(self, version: int, name: str, tokens: int) -> None:
        """The first `tokens` of the conversation, or of the shared prompt, called `name` are computed."""
        known = self._known.get(version)
        if known is None:
            known = self._known[version] = {}
            for old in sorted(self._known)[:-_VERSIONS]:
                del self._known[old]
        if name and tokens > known.get(name, 0):
            known[name] = tokens

    def tokens(self, version: int, conversation: str, root: str) -> int:
        """How much is there of a conversation under these weights, or of the prompt that it shares."""
        known = self._known.get(version, {})
        return max(known.get(conversation, 0), known.get(root, 0))


class StoredKvPool(KvPool):
    """The KV memory of a worker that reads and writes a `KvStore`."""

    def __init__(self, capacity: int, store: KvStore, *, keeps_left_paths: bool = False) -> None:
        super().__init__(capacity, keeps_left_paths=keeps_left_paths)
        self._store = store
        self._to_load = 0

    def load(self, conversation: str, root: str, found: int, most: int) -> int:
        """See `KvPool`."""
        stored = min(self._store.tokens(self.version, conversation, root), most)
        if stored <= found:
            return found
        self._to_load += stored - found
        return stored

    def loading_s(self) -> float:
        """See `KvPool`."""
        tokens, self._to_load = self._to_load, 0
        return tokens * self._store.seconds_per_token

    def computed(self, root: str, tokens: int) -> None:
        """See `KvPool`."""
        self._store.put(self.version, root, tokens)

    def keep(self, conversation: str, hold: Hold, tokens: int) -> None:
        """See `KvPool`."""
        if self.current(hold):
            self._store.put(self.version, conversation, tokens)
        super().keep(conversation, hold, tokens)
