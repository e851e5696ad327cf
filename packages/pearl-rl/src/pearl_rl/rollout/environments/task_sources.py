"""Where tasks come from: an endless seeded sequence, or the rows of a data set in a new order each time round."""

import random
from collections.abc import Callable, Sequence

from pearl_rl.rollout.environments.protocol import EnvironmentSettingsError, Task


class SeededTasks:
    """An endless `TaskSource`: `make(index)` gives each task."""

    def __init__(self, make: Callable[[int], Task]) -> None:
        self._make = make

    @property
    def size(self) -> int | None:
        """None: there is no end."""
        return None

    def task(self, index: int) -> Task:
        """The task at `index`."""
        return self._make(index)


class DatasetTasks:
    """A `TaskSource` over fixed tasks: every pass takes each once, in an order that `seed` and the pass decide."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise EnvironmentSettingsError("the data set has no tasks")
        self._tasks = tuple(tasks)
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def size(self) -> int | None:
        """Number of tasks."""
        return len(self._tasks)

    def task(self, index: int) -> Task:
        """The task at `index`, which counts on through all passes."""
        epoch, place = divmod(index, len(self._tasks))
        if self._order[0] != epoch:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._tasks[self._order[1][place]]
