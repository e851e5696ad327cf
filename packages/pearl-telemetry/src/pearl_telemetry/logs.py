"""Log records of the run as OpenTelemetry log records, each with the span that its task works for."""

import logging
from collections.abc import Callable
from typing import Any

from opentelemetry._logs import LoggerProvider, SeverityNumber
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pearl_telemetry.instruments import SCOPE

_CARRIER = TraceContextTextMapPropagator()
_SEVERITIES = (
    (logging.ERROR, SeverityNumber.ERROR),
    (logging.WARNING, SeverityNumber.WARN),
    (logging.INFO, SeverityNumber.INFO),
)


class CorrelatedLogs(logging.Handler):
    """A handler for the loggers of the run's packages. `context` gives the `traceparent` of the present task."""

    def __init__(self, provider: LoggerProvider, context: Callable[[], str]) -> None:
        super().__init__()
        self._logger = provider.get_logger(SCOPE)
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on, with its message, level, logger, and the text of its exception.

        One that cannot be, such as a message that does not fit its arguments, is reported as `logging` does it.
        """
        try:
            self._emit(record)
        except Exception:
            self.handleError(record)

    def _emit(self, record: logging.LogRecord) -> None:
        attributes: dict[str, Any] = {"logger.name": record.name}
        if record.exc_info and record.exc_info[0] is not None:
            attributes["exception.type"] = record.exc_info[0].__name__
            attributes["exception.message"] = str(record.exc_info[1])
        context = self._context()
        self._logger.emit(
            timestamp=int(record.created * 1e9),
            context=_CARRIER.extract({"traceparent": context}) if context else None,
            severity_number=next(
                (found for level, found in _SEVERITIES if record.levelno >= level), SeverityNumber.DEBUG
            ),
            severity_text=record.levelname,
            body=record.getMessage(),
            attributes=attributes,
        )
