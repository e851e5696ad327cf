"""The table of a run over time, from the changes in `table.jsonl`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_SERVING_ROLES = ("prefill", "decode", "colocated")
_LETTERS = {"prefill": "P", "decode": "D", "colocated": "C", "training": "T"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All rows after one change. Rows are objects as `encode` makes them, by slot; `about` is the change's line."""

    at_s: float
    rows: Mapping[int, Mapping[str, Any]]
    about: Mapping[str, Any]


def applied(rows: Mapping[int, Mapping[str, Any]], line: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The rows after one line of `table.jsonl`."""
    before = {} if line.get("fresh") else rows
    after = {**before, **{int(id_): row for id_, row in line["rows"].items()}}
    for id_ in line["gone"]:
        after.pop(int(id_), None)
    return after


def snapshots(lines: Iterable[Mapping[str, Any]]) -> Iterator[Snapshot]:
    """Every table of a run, in order."""
    rows: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        rows = applied(rows, line)
        yield Snapshot(float(line["now_s"]), rows, line)


def configuration_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The active configuration as text: `2P3D`, `4C`, or what a transition mixes, like `1P2D+1C`."""
    counts = dict.fromkeys(_SERVING_ROLES, 0)
    for row in rows:
        if row["lifecycle"] == "active" and row["role"] in counts:
            counts[row["role"]] += 1
    prefill, decode, colocated = (counts[role] for role in _SERVING_ROLES)
    if not (prefill or decode):
        return f"{colocated}C"
    return f"{prefill}P{decode}D" + (f"+{colocated}C" if colocated else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """From `at_s` on, until the next one, these GPUs and workers were there."""

    at_s: float
    reserved_gpus: int
    """Dedicated GPUs of rollout that nobody takes away."""
    preemptible_gpus: int
    """Dedicated GPUs that come and go, those under notice included."""
    borrowed_gpus: int
    """Training GPUs that rollout holds."""
    prefill: int
    decode: int
    colocated: int
    configuration: str

    @property
    def gpus(self) -> int:
        """The rollout budget."""
        return self.reserved_gpus + self.preemptible_gpus + self.borrowed_gpus


@dataclass(frozen=True, slots=True)
class Span:
    """One slot in one role and state for a while."""

    start_s: float
    end_s: float
    role: str
    state: str
    """A lifecycle; for training also `running` while an update runs."""


@dataclass(slots=True)
class Lane:
    """One slot of the worker map."""

    name: str
    group: str
    """`training`, `borrowed`, `reserved` or `preemptible`."""
    spans: list[Span] = field(default_factory=list[Span])


def levels(history: Iterable[Snapshot]) -> list[Level]:
    """GPUs and serving workers over time; one entry for each change of them."""
    found: list[Level] = []
    for snapshot in history:
        level = _level(snapshot)
        if found and found[-1].at_s == level.at_s:
            found.pop()
        if not found or _without_time(found[-1]) != _without_time(level):
            found.append(level)
    return found


def _level(snapshot: Snapshot) -> Level:
    gpus = {"reserved": 0, "preemptible": 0, "borrowed": 0}
    roles = dict.fromkeys(_SERVING_ROLES, 0)
    for row in snapshot.rows.values():
        if row["role"] == "training":
            continue
        active = row["lifecycle"] == "active"
        if active:
            roles[row["role"]] += 1
        if row["zone"] == "dedicated":
            gpus[row["tenure"]] += len(row["gpus"])
        elif active:
            gpus["borrowed"] += len(row["gpus"])
    return Level(
        at_s=snapshot.at_s,
        reserved_gpus=gpus["reserved"],
        preemptible_gpus=gpus["preemptible"],
        borrowed_gpus=gpus["borrowed"],
        configuration=configuration_text(snapshot.rows.values()),
        **roles,
    )


def _without_time(level: Level) -> tuple[object, ...]:
    return (
        level.reserved_gpus,
        level.preemptible_gpus,
        level.borrowed_gpus,
        level.prefill,
        level.decode,
        level.colocated,
    )


def lanes(history: Iterable[Snapshot], end_s: float) -> list[Lane]:
    """The worker map: one lane for training as a whole, and one for each rollout slot that ever was."""
    found: dict[tuple[str, int], Lane] = {}
    open_: dict[tuple[str, int], tuple[float, str, str]] = {}
    for snapshot in history:
        now = dict(_states(snapshot))
        for key in [key for key in open_ if key not in now]:
            _close(found, open_, key, snapshot.at_s)
        for key, (name, role, state) in now.items():
            lane = found.setdefault(key, Lane(name, key[0]))
            lane.name = name
            if key in open_ and open_[key][1:] != (role, state):
                _close(found, open_, key, snapshot.at_s)
            open_.setdefault(key, (snapshot.at_s, role, state))
    for key in list(open_):
        _close(found, open_, key, end_s)
    order = ("training", "borrowed", "reserved", "preemptible")
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]


def _close(
    found: Mapping[tuple[str, int], Lane],
    open_: dict[tuple[str, int], tuple[float, str, str]],
    key: tuple[str, int],
    now_s: float,
) -> None:
    start_s, role, state = open_.pop(key)
    if now_s > start_s:
        found[key].spans.append(Span(start_s, now_s, role, state))


def _states(snapshot: Snapshot) -> Iterator[tuple[tuple[str, int], tuple[str, str, str]]]:
    """(group, slot) → (name, role, state)."""
    training = [row for row in snapshot.rows.values() if row["role"] == "training"]
    if training:
        held = {row["lifecycle"] for row in training}
        state = held.pop() if len(held) == 1 else "draining"
        if state == "active" and snapshot.about["training"] == "running":
            state = "running"
        gpus = sum(len(row["gpus"]) for row in training)
        yield ("training", -1), (f"training, {gpus} GPU{'s' * (gpus != 1)}", "training", state)
    for id_, row in snapshot.rows.items():
        if row["role"] == "training":
            continue
        group = "borrowed" if row["zone"] == "overlap" else row["tenure"]
        state = "cordoned" if row["cordoned"] and row["lifecycle"] != "active" else row["lifecycle"]
        yield (group, id_), (f"{id_} on {gpu_words(row['gpus'])}", row["role"], state)


def gpu_words(gpus: Iterable[int]) -> str:
    """`GPU 4`, `GPU 4-5`, `GPU 4,7`."""
    ids = sorted(gpus)
    if len(ids) > 1 and ids == list(range(ids[0], ids[-1] + 1)):
        return f"GPU {ids[0]}-{ids[-1]}"
    return f"GPU {','.join(map(str, ids))}"


def role_letter(role: str) -> str:
    """P, D, C or T."""
    return _LETTERS[role]
