"""`[telemetry]`: where traces, metrics and scalars go."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from pearl_rl.settings.job import Section


def _collector(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        raise PydanticCustomError("collector", "must begin with http:// or https://, like http://localhost:4318")
    return value


class TelemetrySettings(Section):
    """`[telemetry]`: OpenTelemetry exporters (they need pearl-telemetry[sdk]) and scalar sinks. Nothing by default."""

    jsonl: bool = Field(description="write spans.jsonl, points.jsonl and logs.jsonl into the run folder")
    otlp_endpoint: Annotated[str, AfterValidator(_collector)] = Field(
        description="OTLP/HTTP collector, like http://localhost:4318; empty for none"
    )
    prometheus_port: int = Field(ge=0, le=65_535, description="page that Prometheus scrapes; 0 for none")
    prometheus_host: str = Field(min_length=1, description="address that the page listens on")
    interval_s: float = Field(gt=0, le=3_600, description="time between exports of metrics, seconds")
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = Field(description="scalar sinks of each step's figures")
