"""What a run's records say, in words: what went well, what did not, and what to try."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from statistics import fmean

from pearl_rl.presentation.words import seconds
from pearl_rl.report.charts import seconds_signed, step_shares
from pearl_rl.report.run_record import RunRecord
from pearl_rl.report.svg import number
from pearl_rl.settings.keys import OF_SCENARIOS

_GOOD_WAPE, _POOR_WAPE = 0.10, 0.25
_TENTH = 0.1
_TELLING_STEPS = 10
_OF_JOBS = {".".join(job): ".".join(scenario) for scenario, job in OF_SCENARIOS.items()}


class Level(StrEnum):
    """How a finding is meant."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence or two about a run."""

    level: Level
    text: str


def diagnose(run: RunRecord) -> list[Finding]:
    """Findings, the gravest first."""
    found = [finding for rule in _RULES for finding in rule(run)]
    order = list(reversed(Level))
    return sorted(found, key=lambda finding: order.index(finding.level))


def _ended(run: RunRecord) -> Iterator[Finding]:
    if run.summary is None:
        done = f"{len(run.steps)} of {run.steps[-1]['steps']} steps" if run.steps else "no step"
        yield Finding(Level.NOTE, f"The run has no summary: it goes on, or was killed. {done} are complete.")


def _integrity(run: RunRecord) -> Iterator[Finding]:
    counts = run.counts
    lost, stale = counts.get("lost_trajectories", 0), counts.get("stale_served", 0)
    if run.steps:
        lost = max(lost, run.steps[-1]["lost_trajectories"])
    if lost:
        yield Finding(Level.BAD, f"{lost} trajectories were dispatched and are not accounted for. This is a bug.")
    if stale:
        yield Finding(Level.BAD, f"{stale} requests were served by weights older than the bound. This is a bug.")
    reclaims = run.events["GpusReclaimed"]
    if not lost and not stale and reclaims:
        resumed = f" {run.interrupted} requests were interrupted and resumed elsewhere." if run.interrupted else ""
        yield Finding(
            Level.GOOD,
            f"GPUs were taken away {_times(reclaims)}; no trajectory was lost and none was served by stale weights."
            + resumed,
        )


def _divergence(run: RunRecord) -> Iterator[Finding]:
    """An update that came to no number ruins the weights of all later ones."""
    lost = [step for step in run.steps if not all(isfinite(step[key]) for key in ("loss", "gradient_norm"))]
    if lost and not run.simulated:
        yield Finding(
            Level.BAD,
            f"Loss or gradient norm is no finite number {_times(len(lost))}, first at step {lost[0]['step']}: training "
            "has diverged. A lower train.learning_rate or train.max_gradient_norm may hold it; go on from weights "
            "before that.",
        )


def _failures(run: RunRecord) -> Iterator[Finding]:
    if run.failures:
        at_s, what = run.failures[0]
        more = f", and {len(run.failures) - 1} more" if len(run.failures) > 1 else ""
        yield Finding(Level.WARNING, f"{what} (at {seconds(at_s)}){more}.")


def _prediction(run: RunRecord) -> Iterator[Finding]:
    wape = run.wape
    if wape is None:
        return
    if wape <= _GOOD_WAPE:
        yield Finding(Level.GOOD, f"Predicted step times are off by {wape:.1%} on average: decisions rest on them.")
        return
    level = Level.WARNING if wape > _POOR_WAPE else Level.NOTE
    yield Finding(
        level,
        f"Predicted step times are off by {wape:.1%} on average. Where that exceeds the gain of a switch, choices "
        f"between close configurations are luck; a higher {_key(run, 'planner.ratio_threshold')} keeps the current "
        "one.",
    )


def _shares(run: RunRecord) -> Iterator[Finding]:
    total = sum(step["duration_s"] for step in run.steps)
    if not total:
        return
    parts = {name: sum(step_shares(step)[name] for step in run.steps) / total for name in step_shares(run.steps[0])}
    yield Finding(
        Level.NOTE,
        f"Of the time, {parts['rollout']:.0%} is rollout that training does not hide, {parts['training']:.0%} training "
        f"and {parts['waiting']:.0%} waiting for training's GPUs.",
    )
    if parts["waiting"] > _TENTH:
        yield Finding(
            Level.WARNING,
            f"Training waits for its GPUs {parts['waiting']:.0%} of the time: returning borrowed workers is slow "
            f'here; {_key(run, "cluster.borrowing")} = "off" shows what it costs.',
        )
    bound = sum(step["wait_bound_s"] for step in run.steps) / total
    if bound > _TENTH:
        yield Finding(
            Level.WARNING,
            f"Batches wait for the staleness bound {bound:.0%} of the time; "
            f"{_key(run, 'train.max_staleness_versions')} one higher lets rollout run ahead.",
        )


def _turns(run: RunRecord) -> Iterator[Finding]:
    if not run.latency:
        return
    largest = max(run.latency, key=lambda part: run.latency[part].share)
    share = run.latency[largest].share
    running = "" if run.simulated else ", or a higher engine.max_running,"
    advice = {
        "queue": f"Requests wait: more rollout GPUs{running} would shorten it.",
        "prefill": "Prefill leads: more prefill workers, or prefixes that stay in the cache, would shorten it.",
        "transfer": "The hand-over of KV leads: colocation, or faster links, would shorten it.",
        "decode": "Decoding leads: more decode workers, or shorter responses, would shorten it.",
        "environment": "Environments lead: more GPUs would hardly help.",
    }
    yield Finding(Level.NOTE, f"{share:.0%} of a turn's time is {largest}. {advice[largest]}")


def _borrowing(run: RunRecord) -> Iterator[Finding]:
    compared = [gate for gate in run.gates if not gate.first]
    if not compared:
        return
    lent = [gate for gate in compared if gate.open]
    waited = fmean([step["wait_grant_s"] for step in run.steps]) if run.steps else 0.0
    text = f"Lending training GPUs was weighed {_times(len(compared))} and done {_times(len(lent))}."
    if any(gate.first and gate.open for gate in run.gates):
        text += " At the very first, when nobody else served yet, they were lent without weighing."
    if lent:
        gain = sum(gate.benefit_s - gate.toggle_s for gate in lent)
        text += f" By prediction it gained {seconds_signed(gain)} net."
    text += f" Training waited {seconds(waited)} a step for its GPUs."
    yield Finding(Level.NOTE, text)


def _switching(run: RunRecord) -> Iterator[Finding]:
    """Changes of mode or ratio; that the budget grows or shrinks is none."""
    switches = [line["decision"] for line in run.decisions if line["decision"]["switch"] in ("flip", "relaunch")]
    if not run.steps or not switches:
        return
    if len(switches) > len(run.steps):
        yield Finding(
            Level.WARNING,
            f"{len(switches)} changes of mode or ratio in {len(run.steps)} steps: thresholds below the noise of the "
            f"predictions make it flap. Raise {_key(run, 'planner.ratio_threshold')} or "
            f"{_key(run, 'planner.mode_threshold')}.",
        )
        return
    gained = fmean([max(0.0, decision["gain_s"]) for decision in switches])
    yield Finding(
        Level.NOTE,
        f"Workers changed their roles {_times(len(switches))} for a better mode or ratio, predicted to save "
        f"{seconds(gained)} a batch each.",
    )


def _learning(run: RunRecord) -> Iterator[Finding]:
    if run.simulated or len(run.steps) < 4:
        return
    first, last, part = reward_ends(run)
    words = f"Reward went from {first:.3f} (first {part}) to {last:.3f} (last {part})"
    if part < _TELLING_STEPS:
        yield Finding(Level.NOTE, f"{words}; {len(run.steps)} steps are too few to see learning.")
    else:
        yield Finding(Level.GOOD if last > first else Level.WARNING, f"{words}.")


def reward_ends(run: RunRecord) -> tuple[float, float, int]:
    """Mean reward of the first and of the last steps, and how many: at most ten, never the same ones."""
    rewards = [step["reward_mean"] for step in run.steps]
    part = max(1, min(_TELLING_STEPS, len(rewards) // 2))
    return fmean(rewards[:part]), fmean(rewards[-part:]), part


def _budget(run: RunRecord) -> Iterator[Finding]:
    if not run.levels or run.end_s <= run.levels[0].at_s:
        return
    ends = [level.at_s for level in run.levels[1:]] + [run.end_s]
    amounts = [(level.gpus, end - level.at_s) for level, end in zip(run.levels, ends, strict=True)]
    # Before the first GPU came there was nothing to have.
    while len(amounts) > 1 and not amounts[0][0]:
        amounts.pop(0)
    mean = sum(gpus * length for gpus, length in amounts) / sum(length for _, length in amounts)
    counts = [gpus for gpus, _ in amounts]
    yield Finding(
        Level.NOTE, f"Rollout had {number(mean)} GPUs on average, {min(counts)} at least and {max(counts)} at most."
    )


def _key(run: RunRecord, of_job: str) -> str:
    """What a setting of a job is called in what the run was configured by."""
    return _OF_JOBS.get(of_job, of_job) if run.simulated else of_job


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


_RULES: Sequence[Callable[[RunRecord], Iterator[Finding]]] = (
    _ended,
    _integrity,
    _failures,
    _divergence,
    _learning,
    _prediction,
    _shares,
    _turns,
    _budget,
    _borrowing,
    _switching,
)
