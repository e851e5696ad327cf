"""The test tool of the bisect game: build the project as it was at a commit and run its tests, for real.

Runs in a sandbox process under `python -I -S`: standard library only, nothing imported from this project.
"""

import random
from typing import Any

MODULES = ("parser", "cache", "router", "writer", "reader", "index", "store", "queue")


def source(module: str, commit: int, culprit: int, faulty: str) -> str:
    """The module's source text at `commit`: from `culprit` on, the faulty one loses its increment."""
    body = "value" if module == faulty and commit >= culprit else "value + 1"
    return f"def {module}(value):\n    return {body}\n"


def passes(module: str, commit: int, culprit: int, faulty: str) -> bool:
    """Whether the module's test passes at `commit`."""
    namespace: dict[str, Any] = {}
    exec(compile(source(module, commit, culprit, faulty), f"{module}.py", "exec"), namespace)
    return bool(namespace[module](commit) == commit + 1)


def run(argument: dict[str, Any]) -> dict[str, Any]:
    """Test `commit`, and the faulty module at its parent.

    Takes `commit`, `culprit` (the first bad commit), `faulty` (a module), `lines` (modules to report, at least 1),
    `seed`. Gives `results` ([module, passed] pairs in the order they ran, the faulty one among them), `bad` and
    `parent_bad`.
    """
    commit, culprit, faulty = int(argument["commit"]), int(argument["culprit"]), str(argument["faulty"])
    draw = random.Random(argument["seed"] * 1009 + commit)
    others = draw.sample([module for module in MODULES if module != faulty], max(0, int(argument["lines"]) - 1))
    order = [faulty, *others]
    draw.shuffle(order)
    results = [[module, passes(module, commit, culprit, faulty)] for module in order]
    return {
        "results": results,
        "bad": not passes(faulty, commit, culprit, faulty),
        "parent_bad": not passes(faulty, commit - 1, culprit, faulty),
    }
