"""How ready the data is for training, measured at the boundary after each update (TideRL section 5.2).

A micro-batch is a group: the buffer hands out nothing smaller. The planner says what follows; the training ranks are
fixed for a run here, so what moves is who has the training GPUs between two updates.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from pearl_planner.readiness import BufferReadiness, ReadinessSettings, scaling_reason
from pearl_state.events import Event, ReadinessMeasured

_SMOOTHING: Final = 0.3
"""Weight of the newest observation."""


class ReadinessMonitor:
    """Follows the complete groups of one run, and posts `ReadinessMeasured`. Times are on the run's clock, seconds."""

    def __init__(
        self,
        settings: ReadinessSettings,
        *,
        group_size: int,
        post: Callable[[Event], None],
        evaluates: Callable[[int], bool] = lambda _version: False,
    ) -> None:
        """`evaluates` says whether an evaluation of a version begins when it is published."""
        self._settings = settings
        self._size = group_size
        self._post = post
        self._evaluates = evaluates
        self._since_s: deque[float] = deque()
        """When each group that waits for training became complete, oldest first."""
        self._newest_s: float | None = None
        self._interval_s = 0.0
        self._boundary_s: float | None = None
        self._step_s = 0.0

    def began(self, step: int, now_s: float) -> None:
        """The run begins: `step` were made before. Nothing is ready, so everything rolls out."""
        self._boundary_s = now_s
        self._tell(
            step,
            now_s,
            BufferReadiness(volume=0, ready=0, ras=0, tprm_s=0.0, head_of_line_s=0.0, step_s=0.0, cold_start=True),
        )

    def ready(self, groups: int, now_s: float) -> None:
        """So many groups are complete and wait for training."""
        for _ in range(groups - len(self._since_s)):
            if self._newest_s is not None:
                self._interval_s = _mean(self._interval_s, now_s - self._newest_s)
            self._newest_s = now_s
            self._since_s.append(now_s)

    def taken(self, groups: int) -> None:
        """Training took the oldest `groups`."""
        for _ in range(min(groups, len(self._since_s))):
            self._since_s.popleft()

    def boundary(self, step: int, version: int, consumed: int, update_s: float, now_s: float) -> None:
        """`step` was made in an update of `update_s` on `consumed` trajectories; `version` is about to be published."""
        if self._boundary_s is not None:
            self._step_s = _mean(self._step_s, now_s - self._boundary_s)
        self._boundary_s = now_s
        ready = len(self._since_s)
        buffer = BufferReadiness(
            volume=consumed + ready * self._size,
            ready=ready * self._size,
            ras=ready,
            tprm_s=self._interval_s,
            head_of_line_s=now_s - self._since_s[0] if ready else 0.0,
            step_s=self._step_s,
            micro_batch_s=update_s * self._size / consumed if consumed else 0.0,
            evaluating=self._evaluates(version),
        )
        self._tell(step, now_s, buffer)

    def _tell(self, step: int, now_s: float, buffer: BufferReadiness) -> None:
        self._post(
            ReadinessMeasured(
                now_s=now_s,
                step=step,
                reason=scaling_reason(buffer, self._settings),
                volume=buffer.volume,
                ready=buffer.ready,
                interval_s=buffer.tprm_s,
                group_s=buffer.micro_batch_s,
                head_of_line_s=buffer.head_of_line_s,
                step_s=buffer.step_s,
            )
        )


def _mean(mean_s: float, newest_s: float) -> float:
    return newest_s if not mean_s else mean_s + _SMOOTHING * (newest_s - mean_s)
