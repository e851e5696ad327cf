"""KV hand-over between workers: a prefill worker keeps KV in rooms, a decode worker pulls it directly from there.

Neither side waits: both go on with their iterations. A pull occupies the receiver's emulated link (transfers of one
worker follow each other at the paced bandwidth) and is delivered when it would be over. KV that nobody claims expires.
"""

import hmac
import math
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from pearl_executor.pacing import Pace
from pearl_executor.ports import GenerateRequest, TransferError
from pearl_executor.runtimes.local.frames import Frame, FrameSocket
from pearl_executor.runtimes.local.hosting import Blob, BlobReader
from pearl_executor.runtimes.local.polling import Poller
from pearl_state.samples import TransferSample

Clock = Callable[[], float]


class KvRooms:
    """The prefill side: KV by room, until the receiver says that it has it, or nobody came for `ttl_s` seconds.

    Whoever asks must show `key`; where only this user can reach the listener it may be empty.
    """

    def __init__(self, listener: socket.socket, poller: Poller, clock: Clock, ttl_s: float, key: str = "") -> None:
        self._key = key
        self._clock = clock
        self._ttl_s = ttl_s
        self._rooms: dict[str, tuple[Blob, float]] = {}
        poller.listen(listener, self._serve)

    def __len__(self) -> int:
        return len(self._rooms)

    def offer(self, room: str, blob: Blob) -> None:
        """Keep `blob` for whoever asks for `room`."""
        self._rooms[room] = (blob, self._clock() + self._ttl_s)

    def drop(self, room: str) -> None:
        """Forget a room."""
        self._rooms.pop(room, None)

    def expire(self) -> float:
        """Forget rooms nobody claimed in time. Returns when the next one expires."""
        now_s = self._clock()
        for room in [room for room, (_, end_s) in self._rooms.items() if end_s <= now_s]:
            del self._rooms[room]
        return min((end_s for _, end_s in self._rooms.values()), default=math.inf)

    def _serve(self, peer: FrameSocket, frame: Frame) -> None:
        if not hmac.compare_digest(str(frame.head.get("key", "")).encode(), self._key.encode()):
            peer.close()
            return
        room = frame.head["room"]
        if frame.head["op"] == "drop":
            self.drop(room)
        elif room in self._rooms:
            blob, _ = self._rooms[room]
            peer.send({"room": room}, blob.tail(frame.head["start"]).to_bytes())
        else:
            peer.send({"room": room, "error": f"holds no KV of {room} (never exported, expired, or dropped)"})


@dataclass(slots=True)
class Pull:
    """One request whose KV is on its way."""

    request: GenerateRequest
    call: int
    """The parent's call that the request answers."""
    peer: str
    """Address of the prefill worker."""
    asked_s: float
    due_s: float = math.inf
    """When the emulated transfer is over."""
    blob: Blob | None = None
    error: str = ""
    transfer_s: float = 0.0
    whole: bool = False
    """Whether all KV was asked for, though some was here."""


@dataclass(slots=True)
class KvPulls:
    """The decode side: requests that wait for KV of other workers."""

    poller: Poller
    clock: Clock
    pace: Pace
    read_blob: BlobReader
    held_tokens: Callable[[list[int], str], int]
    timeout_s: float
    key: str = ""
    """Shown to prefill workers."""
    _pulls: dict[str, Pull] = field(default_factory=dict)
    _peers: dict[str, FrameSocket] = field(default_factory=dict)
    _link_free_s: float = 0.0
    _samples: deque[TransferSample] = field(default_factory=lambda: deque(maxlen=4096))

    def __len__(self) -> int:
        return len(self._pulls)

    def __contains__(self, rid: str) -> bool:
        return rid in self._pulls

    def begin(self, pull: Pull) -> None:
        """Ask `pull.peer` for the KV of `pull.request`, or for the part of it that is not here."""
        rid = pull.request.rid
        self._pulls[rid] = pull
        start = 0 if pull.whole else self.held_tokens(list(pull.request.prompt), pull.request.affinity)
        try:
            peer = self._connect(pull.peer)
        except OSError as error:
            pull.error = f"the prefill worker cannot be reached: {error}"
            return
        peer.send({"op": "pull", "room": rid, "start": start, "key": self.key})

    def cancel(self, rid: str | None) -> list[Pull]:
        """Give up one request, or all with None. Returns those that were waiting."""
        chosen = [pull for key, pull in self._pulls.items() if rid is None or key == rid]
        for pull in chosen:
            del self._pulls[pull.request.rid]
            self._tell_dropped(pull)
        return chosen

    def arrived(self) -> Iterator[Pull]:
        """Take out the requests whose transfer is over: with `blob`, or with `error`."""
        now_s = self.clock()
        for rid, pull in list(self._pulls.items()):
            if pull.blob is None and not pull.error:
                self._check_peer(pull, now_s)
            if pull.error or pull.due_s <= now_s:
                del self._pulls[rid]
                pull.transfer_s = now_s - pull.asked_s
                yield pull

    def done(self, pull: Pull) -> None:
        """The request has its KV: the prefill worker need not keep it."""
        self._tell_dropped(pull)

    def retry_whole(self, pull: Pull) -> bool:
        """Ask again, for all KV, where only a part was asked for before: what was here may be gone by now."""
        if pull.whole:
            return False
        pull.whole, pull.blob, pull.due_s = True, None, math.inf
        self.begin(pull)
        return True

    def next_due_s(self) -> float:
        """When `arrived` may have something, at the latest."""
        if any(pull.error for pull in self._pulls.values()):
            return 0.0
        return min((min(p.due_s, p.asked_s + self.timeout_s) for p in self._pulls.values()), default=math.inf)

    def forget(self, path: str) -> None:
        """Connect anew to the worker at `path` next time."""
        peer = self._peers.pop(path, None)
        if peer is not None and not any(pull.peer == path for pull in self._pulls.values()):
            peer.close()

    def take_samples(self) -> tuple[TransferSample, ...]:
        """Transfers since the last call."""
        samples = tuple(self._samples)
        self._samples.clear()
        return samples

    def _connect(self, path: str) -> FrameSocket:
        peer = self._peers.get(path)
        if peer is None or peer.closed:
            peer = FrameSocket.connect(path, timeout_s=1.0)
            self._peers[path] = peer
            self.poller.add(peer, self._received)
        return peer

    def _received(self, peer: FrameSocket, frame: Frame) -> None:
        del peer
        pull = self._pulls.get(frame.head["room"])
        if pull is None or pull.blob is not None:
            return
        if "error" in frame.head:
            pull.error = f"the prefill worker {frame.head['error']}"
            return
        try:
            blob = self.read_blob(frame.body)
        except TransferError as error:
            pull.error = str(error)
            return
        # Transfers to one worker share its link one after the other; each also pays the fixed cost.
        moving_s = self.pace.transfer_s(blob.nbytes) - self.pace.handover_s
        self._link_free_s = max(self._link_free_s, pull.asked_s) + moving_s
        pull.due_s = max(self.clock(), self._link_free_s + self.pace.handover_s)
        pull.blob = blob
        duration_s = max(self.clock() - pull.asked_s, self.pace.transfer_s(blob.nbytes))
        self._samples.append(TransferSample(blob.kv_tokens, blob.nbytes, duration_s))

    def _check_peer(self, pull: Pull, now_s: float) -> None:
        peer = self._peers.get(pull.peer)
        if peer is None or peer.closed:
            pull.error = "the prefill worker hung up"
        elif now_s - pull.asked_s >= self.timeout_s:
            pull.error = f"the prefill worker sent nothing within {self.timeout_s:g} s"

    def _tell_dropped(self, pull: Pull) -> None:
        with suppress(OSError):
            self._connect(pull.peer).send({"op": "drop", "room": pull.request.rid, "key": self.key})
