"""The live view of a run on a terminal: progress, reward, the worker map, the last decision, time left."""

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pearl_rl.observer import StepRecord
from pearl_rl.presentation.plain import PlainView
from pearl_rl.presentation.words import decision_line, seconds, sparkline
from pearl_state.decision import Decision
from pearl_state.errors import ConfigurationError
from pearl_state.events import Event
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Activity, Role, Tenure, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import Worker

_LETTER = {Role.PREFILL: "P", Role.DECODE: "D", Role.COLOCATED: "C", Role.TRAINING: "T"}
_STYLE = {Role.PREFILL: "yellow", Role.DECODE: "cyan", Role.COLOCATED: "green", Role.TRAINING: "magenta"}
_LEGEND = "P prefill  D decode  C colocated  T training   … changing  · idle  ! failed"
_REDRAW_S = 0.1
_BAR = 30
_SPARK = 40
_NEWS = 6


class LiveView:
    """An observer that redraws one block of the terminal. Use it as a context manager; call `tick` now and then."""

    def __init__(self, console: Console, *, steps: int, wall_limit_s: float, clock: Callable[[], float]) -> None:
        self._steps = steps
        self._wall_limit_s = wall_limit_s
        self._clock = clock
        self._began_s = clock()
        self._drawn_s = self._began_s
        self._table: WorkerTable | None = None
        self._decision = ""
        self._records: list[StepRecord] = []
        self._news: deque[str] = deque(maxlen=_NEWS)
        self._lines = PlainView(self._news.append)
        self._live = Live(self.render(), console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.update(self.render(), refresh=True)
        self._live.stop()

    def on_table(self, table: WorkerTable) -> None:
        """Draw the new table."""
        self._table = table
        self.tick()

    def on_decision(self, decision: Decision, trigger: str) -> None:
        """Draw the decision and its reason."""
        self._decision = decision_line(decision, trigger)
        self.tick()

    def on_step(self, record: StepRecord) -> None:
        """Draw the step's figures."""
        self._records.append(record)
        self.tick()

    def on_event(self, event: Event) -> None:
        """Draw what is worth a line."""
        self._lines.on_event(event)
        self.tick()

    def on_message(self, text: str) -> None:
        """Draw the line."""
        self._lines.on_message(text)
        self.tick()

    def tick(self) -> None:
        """Redraw, at most ten times a second."""
        now_s = self._clock()
        if now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """The whole block."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row("step", self._progress())
        rows.add_row("reward", self._reward())
        if self._table is not None:
            for name, cells in worker_map(self._table):
                rows.add_row(name, cells)
            rows.add_row("", Text(_LEGEND, style="dim"))
            rows.add_row("budget", Text(budget_words(self._table)))
        rows.add_row("decision", Text(self._decision or "none yet"))
        for line in self._news:
            rows.add_row("", Text(line, style="dim"))
        return Group(Text("PEARL", style="bold"), rows)

    def _progress(self) -> Text:
        done = self._records[-1].step if self._records else 0
        elapsed_s = self._clock() - self._began_s
        filled = round(_BAR * min(1.0, done / self._steps))
        text = Text(f"{done}/{self._steps} ")
        text.append("━" * filled, style="green").append("━" * (_BAR - filled), style="dim")
        return text.append(f" {seconds(elapsed_s)}, {self._time_left(done, elapsed_s)}")

    def _time_left(self, done: int, elapsed_s: float) -> str:
        limit_s = max(0.0, self._wall_limit_s - elapsed_s)
        if not done:
            return f"limit in {seconds(limit_s)}"
        left_s = (self._steps - done) * elapsed_s / done
        return f"about {seconds(left_s)} left" if left_s <= limit_s else f"limit in {seconds(limit_s)}"

    def _reward(self) -> Text:
        rewards = [record.reward_mean for record in self._records]
        if not rewards:
            return Text("none yet")
        recent = rewards[-10:]
        text = Text(f"{rewards[-1]:.3f} ").append(sparkline(rewards, _SPARK), style="green")
        return text.append(f" mean of last {len(recent)}: {sum(recent) / len(recent):.3f}")


def worker_map(table: WorkerTable) -> list[tuple[str, Text]]:
    """Rows of the worker map: a name, and one cell a worker with its slot, role and state."""
    groups: dict[str, Text] = {}
    for worker in table.rows.values():
        cells = groups.setdefault(_group(worker), Text())
        cells.append_text(_cell(worker)).append("  ")
    return sorted(groups.items())


def budget_words(table: WorkerTable) -> str:
    """The active configuration and what it is made of."""
    serving = [table.rows[id_] for id_ in table.active()]
    borrowed = sum(worker.zone is Zone.OVERLAP for worker in serving)
    preemptible = sum(worker.tenure is Tenure.PREEMPTIBLE for worker in serving)
    try:
        configuration = str(table.configuration)
    except ConfigurationError:
        configuration = "changing mode"
    reserved = len(serving) - borrowed - preemptible
    return (
        f"{configuration}: {len(serving)} serving = {reserved} reserved + {preemptible} preemptible + "
        f"{borrowed} borrowed, weights v{table.target_version}"
    )


def _group(worker: Worker) -> str:
    if worker.role is Role.TRAINING:
        return "training"
    if worker.zone is Zone.OVERLAP:
        return "overlap"
    return "reserved" if worker.tenure is Tenure.RESERVED else "preemptible"


def _cell(worker: Worker) -> Text:
    letter, style = _LETTER[worker.role], _STYLE[worker.role]
    if worker.lifecycle in (Lifecycle.FAILED, Lifecycle.RETIRED):
        return Text(f"{worker.id}{letter}!", style="bold red")
    if worker.activity is Activity.ACTIVE:
        return Text(f"{worker.id}{letter} ", style=f"bold {style}")
    if worker.activity is Activity.TRANSITIONING:
        return Text(f"{worker.id}{letter}…", style=style)
    return Text(f"{worker.id}{letter}·", style="dim")
