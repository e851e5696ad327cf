"""KV hand-overs that keep failing: the run goes on colocated, where nothing is handed over."""

import asyncio
from collections import deque
from collections.abc import Callable

from pearl_state.configuration import Configuration
from pearl_state.events import ConfigurationPinned, Event


class TransferWatch:
    """Pins colocation once hand-overs fail without end. A person may lift the pin again.

    That is `most` within `window_s` seconds, or `in_a_row` without one between them that succeeds: where few workers
    are left, the router tries them too rarely for the former.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        say: Callable[[str], None] = lambda _text: None,
        *,
        most: int = 20,
        window_s: float = 60.0,
        in_a_row: int = 10,
    ) -> None:
        self._post = post
        self._say = say
        self._most = most
        self._window_s = window_s
        self._in_a_row = in_a_row
        self._failures: deque[float] = deque()
        self._row = 0

    def ended(self, ok: bool) -> None:
        """A hand-over succeeded or failed now."""
        self._row = 0 if ok else self._row + 1
        if ok:
            return
        now_s = asyncio.get_running_loop().time()
        self._failures.append(now_s)
        while self._failures[0] < now_s - self._window_s:
            self._failures.popleft()
        if self._row >= self._in_a_row:
            self._give_up(f"{self._row} hand-overs failed in a row", now_s)
        elif len(self._failures) >= self._most:
            self._give_up(f"{self._most} hand-overs failed within {self._window_s:g} s", now_s)

    def _give_up(self, cause: str, now_s: float) -> None:
        self._failures.clear()
        self._row = 0
        self._say(f"kv_transfer: {cause}; going on colocated")
        self._post(ConfigurationPinned(now_s=now_s, configuration=Configuration(colocated=1)))
