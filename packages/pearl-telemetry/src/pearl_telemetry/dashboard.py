"""A Grafana dashboard over the Prometheus page: one panel a metric, in the order of `metrics`."""

from typing import Any

from pearl_telemetry.dictionary import normal
from pearl_telemetry.metrics import Kind, Metric, all_metrics

_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


def prometheus_name(metric: Metric) -> str:
    """The metric's name on the Prometheus page: dots become underscores, and unit and `_total` are appended."""
    name = metric.name.replace(".", "_")
    if metric.unit == "s":
        name += "_seconds"
    return f"{name}_total" if metric.kind is Kind.COUNTER else name


def grafana() -> dict[str, Any]:
    """The dashboard as Grafana imports it; it asks for a Prometheus data source."""
    panels = [_panel(index, metric) for index, metric in enumerate(all_metrics())]
    return {
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "title": "PEARL",
        "uid": "pearl",
        "tags": ["pearl"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "panels": panels,
    }


def _panel(index: int, metric: Metric) -> dict[str, Any]:
    described = f"{metric.meaning} Normal: {normal(metric)}." if normal(metric) else metric.meaning
    steps = _steps(metric)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": metric.name,
        "description": described,
        "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
        "gridPos": {
            "x": index % _COLUMNS * _WIDTH,
            "y": index // _COLUMNS * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {
            "defaults": {
                "unit": _unit(metric),
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": {"thresholdsStyle": {"mode": "dashed" if len(steps) > 1 else "off"}},
            }
        },
        "targets": [{"refId": "A", "expr": _expression(metric), "legendFormat": _legend(metric)}],
    }


def _steps(metric: Metric) -> list[dict[str, Any]]:
    """Where the colour changes: each step's holds from its value on."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if metric.low is not None and metric.low != 0:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": metric.low}]
    if metric.high is not None:
        # The bound itself is normal: of what is counted, red begins with the next whole one.
        steps.append({"color": "red", "value": metric.high + 1 if metric.unit.startswith("{") else metric.high})
    return steps


def _unit(metric: Metric) -> str:
    """As Grafana calls it."""
    if metric.unit == "s":
        return "s"
    return "percentunit" if metric.is_share else "none"


def _expression(metric: Metric) -> str:
    name = prometheus_name(metric)
    by = f" by ({', '.join(a.replace('.', '_') for a in metric.attributes)})" if metric.attributes else ""
    match metric.kind:
        case Kind.COUNTER:
            return f"sum{by} (increase({name}[5m]))"
        case Kind.HISTOGRAM:
            return f"sum{by} (rate({name}_sum[5m])) / sum{by} (rate({name}_count[5m]))"
        case Kind.GAUGE:
            return f"max{by} ({name})"


def _legend(metric: Metric) -> str:
    return " ".join(f"{{{{{name.replace('.', '_')}}}}}" for name in metric.attributes) or metric.name
