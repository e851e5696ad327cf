"""Notices from the metadata services of clouds, which a machine asks about itself.

Each class names the page that defines its requests and answers. Nothing leaves the machine but a request to its own
link-local service; proxies are not used.
"""

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

from pearl_executor.preemption.notice import Notice, WallClock, wall_clock

_log = logging.getLogger(__name__)
_BODY_LIMIT_BYTES: Final = 1 << 20
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service said."""

    status: int
    text: str


async def ask(
    url: str, headers: Mapping[str, str], *, method: str = "GET", timeout_s: float, context: Any = None
) -> Answer | None:
    """One request to a service nearby; None, and a logged word, where it does not answer within `timeout_s`."""

    def exchange() -> Answer:
        request = urllib.request.Request(url, method=method, headers=dict(headers))
        opener = _DIRECT if context is None else _secure(context)
        try:
            with opener.open(request, timeout=timeout_s) as response:
                return Answer(response.status, response.read(_BODY_LIMIT_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, "")

    try:
        return await asyncio.to_thread(exchange)
    except (OSError, ValueError) as error:
        _log.warning("%s does not answer: %s", url.partition("?")[0], error)
        return None


def _secure(context: Any) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


class AwsSpot:
    """EC2 Spot: `spot/instance-action`, 404 until two minutes before the instance is taken (IMDSv2).

    A hibernation begins at once. A rebalance recommendation is no notice: the instance may stay for hours.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    def __init__(
        self, base: str = "http://169.254.169.254", *, poll_s: float = 5.0, clock: WallClock = wall_clock
    ) -> None:
        self._base = base
        self._poll_s = poll_s
        self._clock = clock

    async def notices(self) -> AsyncGenerator[Notice, None]:
        """One notice for each action and time that the service names."""
        seen: tuple[str, str] | None = None
        token = ""
        while True:
            answer = await self._action(token)
            if answer is not None and answer.status == HTTPStatus.UNAUTHORIZED:
                token = await self._new_token()
                answer = await self._action(token)
            if answer is not None and answer.status == HTTPStatus.OK:
                action = json_object(answer.text)
                key = (str(action.get("action", "")), str(action.get("time", "")))
                if key != seen:
                    seen = key
                    yield Notice(self._left_s(*key), f"EC2 will {key[0]} this Spot instance at {key[1]}")
            await asyncio.sleep(self._poll_s)

    async def _action(self, token: str) -> Answer | None:
        headers = {"X-aws-ec2-metadata-token": token}
        return await ask(f"{self._base}/latest/meta-data/spot/instance-action", headers, timeout_s=2.0)

    async def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        answer = await ask(f"{self._base}/latest/api/token", headers, method="PUT", timeout_s=2.0)
        return answer.text.strip() if answer is not None and answer.status == HTTPStatus.OK else ""

    def _left_s(self, action: str, time: str) -> float:
        if action == "hibernate":
            return 0.0
        return left_s(_iso_time(time), self._clock)


class GcpSpot:
    """Compute Engine: `instance/preempted` becomes TRUE when the machine is told to shut down.

    What follows is best effort and up to `notice_s` seconds (30, unless the machine has a longer notice period).
    https://cloud.google.com/compute/docs/instances/create-use-preemptible
    """

    def __init__(
        self, base: str = "http://metadata.google.internal", *, notice_s: float = 30.0, wait_s: float = 60.0
    ) -> None:
        self._base = base
        self._notice_s = notice_s
        self._wait_s = wait_s

    async def notices(self) -> AsyncGenerator[Notice, None]:
        """At most one: a preempted machine does not come back."""
        url = f"{self._base}/computeMetadata/v1/instance/preempted"
        waiting = ""
        while True:
            answer = await ask(url + waiting, {"Metadata-Flavor": "Google"}, timeout_s=self._wait_s + 5.0)
            if answer is not None and answer.status == HTTPStatus.OK and answer.text.strip() == "TRUE":
                yield Notice(self._notice_s, "Compute Engine preempts this machine")
                return
            good = answer is not None and answer.status == HTTPStatus.OK
            # The first request shows what holds now; later ones wait at the service for a change.
            waiting = f"?wait_for_change=true&timeout_sec={self._wait_s:g}" if good else ""
            if not good or self._wait_s < 1.0:
                await asyncio.sleep(1.0)


class AzureSpot:
    """Azure Scheduled Events of type Preempt, at least 30 seconds ahead; they may be withdrawn.

    Events of other machines of the same set are in the document too: `resource` is this machine's name, asked of the
    service where it is empty. The first request turns the feature on and may take two minutes.
    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    def __init__(
        self,
        base: str = "http://169.254.169.254",
        *,
        resource: str = "",
        poll_s: float = 1.0,
        clock: WallClock = wall_clock,
    ) -> None:
        self._base = base
        self._resource = resource
        self._poll_s = poll_s
        self._clock = clock

    async def notices(self) -> AsyncGenerator[Notice, None]:
        """A notice for each new event, and one that takes it back where it vanishes before it started."""
        url = f"{self._base}/metadata/scheduledevents?api-version=2020-07-01"
        present: dict[str, str] = {}
        while True:
            name = await self._name()
            answer = await ask(url, {"Metadata": "true"}, timeout_s=125.0)
            if answer is not None and answer.status == HTTPStatus.OK and name:
                events = {event["EventId"]: event for event in self._preemptions(json_object(answer.text), name)}
                for id_ in [id_ for id_ in present if id_ not in events]:
                    if present.pop(id_) == "Scheduled":
                        yield Notice(None, "Azure withdrew the preemption")
                for id_, event in events.items():
                    if id_ not in present:
                        left_s = self._left_s(str(event.get("NotBefore", "")))
                        yield Notice(
                            left_s, f"Azure preempts this machine, not before {event.get('NotBefore') or 'now'}"
                        )
                    present[id_] = str(event.get("EventStatus", ""))
            await asyncio.sleep(self._poll_s)

    async def _name(self) -> str:
        if not self._resource:
            url = f"{self._base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            answer = await ask(url, {"Metadata": "true"}, timeout_s=5.0)
            self._resource = answer.text.strip() if answer is not None and answer.status == HTTPStatus.OK else ""
        return self._resource

    @staticmethod
    def _preemptions(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        events = document.get("Events")
        return [
            event
            for event in (events if isinstance(events, list) else [])
            if isinstance(event, dict)
            and event.get("EventType") == "Preempt"
            and name in (event.get("Resources") or ())
            and isinstance(event.get("EventId"), str)
        ]

    def _left_s(self, not_before: str) -> float:
        try:
            return left_s(parsedate_to_datetime(not_before), self._clock)
        except ValueError:
            # Empty once the event has started: the machine may go any moment.
            return 0.0


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of `text`; an empty one where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _iso_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def left_s(at: datetime | None, clock: WallClock) -> float:
    """Seconds until `at` by the wall clock; 0 where it is past or unknown."""
    if at is None:
        return 0.0
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, at.timestamp() - clock())
