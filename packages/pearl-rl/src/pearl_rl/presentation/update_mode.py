"""How reference and actor share the training GPUs, as short text. Lines are those of `update_modes.jsonl`."""

from collections.abc import Mapping
from typing import Any

from pearl_rl.presentation.words import seconds


def update_mode_line(line: Mapping[str, Any]) -> str:
    """A decision and what came of it in one line."""
    return f"ref-actor {update_mode_words(line)}; took {seconds(line['measured_s'])}"


def update_mode_words(line: Mapping[str, Any]) -> str:
    """A decision in a few words: the mode, and why it is not the other one."""
    decision = line["decision"]
    chosen = f"{'changes to' if decision['changes'] else 'stays'} {decision['mode']}"
    return f"{chosen} for version {line['version']} ({_why(decision)})"


def _why(decision: Mapping[str, Any]) -> str:
    together_s, apart_s = decision["colocated_s"], decision["decoupled_s"]
    if together_s is None:
        return "no measurement yet"
    if apart_s is None:
        return f"colocated {seconds(together_s)}; one GPU has no other mode"
    predicted = f"colocated {seconds(together_s)}, decoupled {seconds(apart_s)}"
    if not decision["changes"] and not decision["behind_s"]:
        return predicted
    sign = ">" if decision["changes"] else "≤"
    return f"{predicted}; would have saved {seconds(decision['behind_s'])} {sign} {seconds(decision['reform_s'])}"
