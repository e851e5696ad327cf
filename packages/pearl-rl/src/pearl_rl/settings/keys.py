"""The keys that exist, as dotted names, and the nearest one to a key that does not."""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache

from pearl_rl.settings.job import Section
from pearl_rl.settings.root import Settings

FREE_FORM = ("environment", "args")
"""The one table whose keys are not known here: each environment has its own."""

OF_SCENARIOS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("tp",): ("cluster", "gpus_per_worker"),
    ("policy", "name"): ("planner", "policy"),
    ("policy", "configuration"): ("planner", "configuration"),
    ("policy", "model"): ("planner", "model"),
    ("policy", "ratio_threshold"): ("planner", "ratio_threshold"),
    ("policy", "mode_threshold"): ("planner", "mode_threshold"),
    ("policy", "borrowing"): ("cluster", "borrowing"),
    ("rollout", "batch"): ("rollout", "batch_size"),
    ("rollout", "group_size"): ("train", "group_size"),
    ("rollout", "max_staleness"): ("train", "max_staleness_versions"),
    ("rollout", "readiness"): ("planner", "readiness"),
    ("run", "duration_s"): ("run", "wall_limit_s"),
    ("workload", "max_turns"): ("rollout", "max_turns"),
    ("workload", "max_context_tokens"): ("model", "max_context_tokens"),
}
"""What a scenario of `pearl-rl simulate` calls otherwise than a job does: its key → the job's."""
ONLY_IN_SCENARIOS = frozenset({"name", "about", "gpu", "tp", "parameters", "policy", "workload"})
"""What stands at the top of a scenario and not of a job."""


@cache
def sections() -> dict[tuple[str, ...], type[Section]]:
    """Every section by its path, the root (`()`) included."""
    return dict(_sections((), Settings))


@cache
def leaves() -> tuple[tuple[str, ...], ...]:
    """The path of every setting, in the order of the sections."""
    return tuple(
        (*path, name)
        for path, section in sections().items()
        for name in section.model_fields
        if (*path, name) not in sections()
    )


def nearest(path: tuple[str, ...]) -> str:
    """The dotted name of the valid key nearest to the unknown `path`.

    What a scenario calls so wins, then a key of the same section, unless none there resembles it and another section
    has one that does.
    """
    if path in OF_SCENARIOS:
        return ".".join(OF_SCENARIOS[path])
    wanted = path[-1]

    def likeness(leaf: tuple[str, ...]) -> tuple[float, float]:
        name = SequenceMatcher(None, wanted, leaf[-1]).ratio()
        bonus = 0.4 * (leaf[:-1] == path[:-1]) + 0.4 * leaf[-1].startswith(wanted)
        whole = SequenceMatcher(None, ".".join(path), ".".join(leaf)).ratio()
        return (name + bonus, whole)

    top = [] if len(path) > 1 else [(name,) for name in Settings.model_fields]
    candidates: list[tuple[str, ...]] = [*top, *leaves()]
    best = max(candidates, key=likeness)
    return ".".join(best)


def _sections(path: tuple[str, ...], section: type[Section]) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    yield path, section
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _sections((*path, name), field.annotation)
