"""The metric dictionary: every metric and span with unit, meaning and normal range, made from `metrics`."""

from pearl_telemetry.metrics import Metric, all_metrics, all_spans


def dictionary() -> str:
    """Markdown: one table of metrics, one of spans."""
    lines = ["| metric | unit | kind | normal | attributes | meaning |", "|---|---|---|---|---|---|"]
    for metric in all_metrics():
        attributes = ", ".join(f"`{name}`" for name in metric.attributes)
        cells = (f"`{metric.name}`", f"`{metric.unit}`", metric.kind, normal(metric), attributes, metric.meaning)
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| span | meaning |", "|---|---|"]
    lines += [f"| `{span.name}` | {span.meaning} |" for span in all_spans()]
    return "\n".join(lines)


def normal(metric: Metric) -> str:
    """The normal range in words; empty where none holds for all runs."""
    low, high = metric.low, metric.high
    if low is not None and high is not None:
        return f"{low:g}" if low == high else f"{low:g} … {high:g}"
    if low is not None:
        return f"≥ {low:g}"
    return "" if high is None else f"≤ {high:g}"
