"""Numbers, configurations and decisions as short text."""

from collections.abc import Sequence

from pearl_state.decision import Decision, Reason

_BARS = "▁▂▃▄▅▆▇█"

_REASONS = {
    Reason.INITIAL: "first choice",
    Reason.BEST: "faster than the current one by more than the threshold",
    Reason.ALREADY_BEST: "the current one is the best",
    Reason.WITHIN_HYSTERESIS: "another is faster, but within the threshold",
    Reason.COST_EXCEEDS_GAIN: "another is faster, but the switch would cost more than it gains",
    Reason.FORCED: "the current one cannot run under this budget",
    Reason.FALLBACK: "nothing meets every constraint; the least bad one",
    Reason.FORECAST: "the load of the next seconds wants it",
    Reason.FIXED: "chosen by the policy, whatever is predicted",
    Reason.UNCALIBRATED: "no measurement yet; chosen by the prior",
}


def seconds(value: float) -> str:
    """A duration as text: `12 ms`, `3.4 s`, `2 min 05 s`, `1 h 02 min`."""
    if value < 0.0005:
        return "0 s"
    if value < 0.9995:
        return f"{value * 1e3:.{0 if value >= 0.01 else 1}f} ms"
    if value < 99.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars between their least and greatest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in shown)


def reason_words(reason: Reason) -> str:
    """Why a decision came out as it did, for people."""
    return _REASONS[reason]


def decision_line(decision: Decision, trigger: str) -> str:
    """A decision in one line."""
    before = decision.previous
    change = (
        f"stays {decision.selected}" if before == decision.selected else f"{before or 'nothing'} → {decision.selected}"
    )
    line = f"{trigger}: {change} for {decision.budget_workers} workers, {seconds(decision.predicted_s)} a batch"
    line += gain_words(decision.gain_s, taken=before != decision.selected)
    return f"{line} ({reason_words(decision.reason)})"


def gain_words(gain_s: float, *, taken: bool) -> str:
    """What a switch gains a batch, or would, as the end of a sentence; empty for nothing."""
    text = seconds(gain_s)
    return "" if text == "0 s" else f", {'gains' if taken else 'a switch would gain'} {text}"
