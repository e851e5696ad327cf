"""KV hand-overs that keep failing: the run goes on colocated, where nothing is handed over."""

import asyncio
from collections import deque
from collections.abc import Callable

from pearl_state.configuration import Configuration
from pearl_state.events import ConfigurationPinned, Event


class TransferWatch:
    """Pins colocation once `most` hand-overs failed within `window_s` seconds. A person may lift the pin again."""

    def __init__(
        self,
        post: Callable[[Event], None],
        say: Callable[[str], None] = lambda _text: None,
        *,
        most: int = 20,
        window_s: float = 60.0,
    ) -> None:
        self._post = post
        self._say = say
        self._most = most
        self._window_s = window_s
        self._failures: deque[float] = deque()

    def failed(self) -> None:
        """A hand-over failed now."""
        now_s = asyncio.get_running_loop().time()
        self._failures.append(now_s)
        while self._failures[0] < now_s - self._window_s:
            self._failures.popleft()
        if len(self._failures) < self._most:
            return
        self._failures.clear()
        self._say(f"kv_transfer: {self._most} hand-overs failed within {self._window_s:g} s; going on colocated")
        self._post(ConfigurationPinned(now_s=now_s, configuration=Configuration(colocated=1)))
