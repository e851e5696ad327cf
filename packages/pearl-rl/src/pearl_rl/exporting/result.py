"""What an export found, and what the mappings of all frameworks share."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pearl_rl.errors import SettingsError
from pearl_rl.frameworks import NAMES
from pearl_rl.settings.load import ResolvedSettings
from pearl_rl.settings.root import Settings
from pearl_state.configuration import Configuration

Value = bool | int | float | str

AGGREGATION: Final = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}
"""`train.aggregation` as verl and ROLL call it."""

_GPUS_OF_A_NODE: Final = 8

_OURS_ALONE: Final = (
    ("availability", "there are no preemptible GPUs"),
    ("cluster.ray", "Ray is reached as its launch script says"),
    ("cluster.runtime", "it runs on Ray"),
    ("cluster.max_restarts", "it has its own fault tolerance"),
    ("cluster.min_healthy", "it has its own fault tolerance"),
    ("cluster.expansion_workers", "it has no groups of workers that come together"),
    ("cluster.borrowing", "it does not lend training GPUs to rollout"),
    ("planner", "it does not choose mode and ratio; the ones in force are written where it has such"),
    ("limits", "they bound waits inside PEARL"),
    ("device", "they describe an emulated device"),
    ("engine", "it starts its engines with its own options"),
    ("environment", "name one there, in its own way"),
    ("evaluation", "it validates in its own way"),
    ("telemetry", "it logs in its own way"),
    ("control", "it takes no commands while it runs"),
    ("model.tiny", "a model from scratch is PEARL's"),
    ("model.dtype", "its engine chooses"),
    ("run.dir", "it writes where its launch script says"),
    ("run.wall_limit_s", "bound it from outside"),
    ("run.resume_from", "a run goes on where it began"),
)
"""Beginning of a key of ours → why nothing there is like it; the first that fits."""


@dataclass(slots=True)
class Exported:
    """Their keys with what each came from, and one line for each of ours without a counterpart."""

    framework: str
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    """Their key → value, in the order in which they are written."""
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Their key → our dotted keys."""
    unsupported: list[str] = field(default_factory=list[str])
    """One line for each of ours that nothing there is like."""
    notes: list[str] = field(default_factory=list[str])
    """What a person must look at, beside what is written."""
    told: set[str] = field(default_factory=set[str])
    """Ours that were written or named."""

    def put(self, theirs: str, value: Value, *ours: str) -> None:
        """Set one of theirs from ours."""
        self.values[theirs] = value
        self.origins[theirs] = ours
        self.told.update(ours)

    def drop(self, ours: str, why: str) -> None:
        """Say why one of ours is not written."""
        self.unsupported.append(f"{ours}: {why}")
        self.told.add(ours)

    def note(self, ours: str, what: str) -> None:
        """Say what a person must look at."""
        self.notes.append(f"{ours}: {what}")

    def name_the_rest(self, resolved: ResolvedSettings) -> None:
        """One line for each part of ours that differs from the default job and is not written."""
        if resolved.settings.cluster.max_preemptible_gpus:
            self.drop("cluster.max_preemptible_gpus", f"{NAMES[self.framework]} has no preemptible GPUs")
        named: set[str] = set()
        for path, origin in resolved.origins.items():
            key = ".".join(path)
            if origin == "default" or key in self.told:
                continue
            found = ((begin, why) for begin, why in _OURS_ALONE if key == begin or key.startswith(f"{begin}."))
            begin, why = next(found, (key, f"{NAMES[self.framework]} has no such setting"))
            if begin not in named and begin not in self.told:
                named.add(begin)
                self.unsupported.append(f"{begin}: {why}")


def nodes_of(gpus: int) -> tuple[int, int]:
    """Nodes and GPUs of each, for as many GPUs: whole nodes of eight, or one node."""
    return (gpus // _GPUS_OF_A_NODE, _GPUS_OF_A_NODE) if gpus and gpus % _GPUS_OF_A_NODE == 0 else (1, gpus)


def held(out: Exported, settings: Settings) -> Configuration | None:
    """The disaggregated configuration that the job holds; None where its policy chooses, which is then told."""
    planner = settings.planner
    if planner.policy == "static_pd" and planner.configuration:
        chosen = Configuration.parse(planner.configuration)
        if chosen.prefill and chosen.decode:
            return chosen
    elif planner.policy not in ("static_pd", "colocated"):
        out.drop(
            "planner.policy",
            f"'{planner.policy}' chooses mode and ratio while it runs, {NAMES[out.framework]} keeps those of its start "
            "(integration/guests asks the planner from there)",
        )
    return None


def mini_batch(out: Exported, settings: Settings) -> int:
    """Groups of one optimizer update. Raises `SettingsError` where they do not divide."""
    groups, parts = settings.train.groups_per_step, settings.train.minibatches
    if groups % parts:
        raise SettingsError(
            f"train.groups_per_step = {groups} does not divide by train.minibatches = {parts}; "
            f"{NAMES[out.framework]} counts whole groups of an update"
        )
    return groups // parts


def check_batch(out: Exported, settings: Settings) -> None:
    """Say where rollout keeps another number of trajectories than a step trains on: there they are the same."""
    trained = settings.train.groups_per_step * settings.train.group_size
    if settings.rollout.batch_size == trained:
        out.told.add("rollout.batch_size")
    else:
        out.drop(
            "rollout.batch_size", f"{settings.rollout.batch_size} are under way; there it is the {trained} trained on"
        )


def copied(out: Exported, settings: Settings, pairs: Iterable[tuple[str, str]]) -> None:
    """Numbers that both have under some name: (ours, theirs)."""
    for ours, theirs in pairs:
        value: object = settings
        for part in ours.split("."):
            value = getattr(value, part)
        assert isinstance(value, bool | int | float | str)
        out.put(theirs, value, ours)


def model_path(out: Exported, settings: Settings, theirs: str) -> None:
    """The model's folder; a tiny one from scratch is PEARL's alone."""
    if settings.model.path == "tiny":
        out.drop("model.path", f"'tiny' is built from scratch; name a model's folder as {theirs}")
    else:
        out.put(theirs, settings.model.path, "model.path")


def yaml_text(out: Exported, head: str) -> str:
    """Dotted keys as a YAML document; each line says which of our keys it came from."""
    tree: dict[str, object] = {}
    for key in out.values:
        node = tree
        *path, last = key.split(".")
        for part in path:
            inner = node.setdefault(part, {})
            assert isinstance(inner, dict)
            node = inner
        node[last] = key
    return head + "\n".join(_yaml_lines(out, tree, "")) + "\n"


def _yaml_lines(out: Exported, tree: dict[str, object], indent: str) -> Iterable[str]:
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield f"{indent}{name}:"
            yield from _yaml_lines(out, inner, indent + "  ")
        else:
            key = str(inner)
            yield f"{indent}{name}: {_yaml_value(out.values[key])}{origin_note(out, key)}"


def _yaml_value(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        # YAML 1.1 takes 1e-06 for a string.
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return str(value) if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def origin_note(out: Exported, key: str) -> str:
    """Where a value came from, as a comment; empty for what needs saying only there."""
    ours = out.origins[key]
    return f"  # {', '.join(ours)}" if ours else ""
