"""How far predicted makespans are from measured ones over a whole run: one figure for simulations, runs and replays."""

from collections.abc import Iterable

from pearl_rl.settings.names import injects_continuously


def overlapping_batches(injection: str, policy: str, max_staleness: int) -> int:
    """How many batches are under way at a time: one where each is dispatched as a whole, else what the bound admits.

    `injection` and `policy` as `injects_continuously` takes them.
    """
    return 1 + max_staleness if injects_continuously(injection, policy) else 1


def prediction_error(steps: Iterable[tuple[float, float | None]], overlap: int = 1) -> float | None:
    """WAPE of predicted against measured times, a step being (measured, predicted), seconds; None without any.

    Batches that overlap are complete in bursts: several at once, then none for long. What is predicted there is how
    fast all that is under way advances, so as many steps count as one: of k of them the measured time is their sum, and
    the predicted one that in which predicted progress, the sum of measured/predicted, comes to k (see
    `pearl_rl.control.prediction`). A last few that are fewer than k are left out, unless there are no others.
    """
    known = [(measured, predicted) for measured, predicted in steps if predicted is not None and predicted > 0]
    whole = len(known) - len(known) % overlap or len(known)
    off_s = total_s = 0.0
    for first in range(0, whole, overlap):
        window = known[first : first + overlap]
        measured_s = sum(measured for measured, _ in window)
        progress = sum(measured / predicted for measured, predicted in window)
        if progress > 0:
            off_s += abs(measured_s - len(window) * measured_s / progress)
            total_s += measured_s
    return off_s / total_s if total_s else None
