"""A decision as text: every candidate with both predictions and what they are made of."""

from pearl_state.decision import Candidate, Constraint, Decision, MakespanTerms

_COLUMNS = ("", "candidate", "makespan", "printed", "prefill", "decode", "transfer", "overhead", "env", "again", "path")


def deciding_constraints(decision: Decision) -> tuple[Constraint, ...]:
    """The constraints without which a faster candidate would have been selected; empty where none decided."""
    feasible = [c.makespan_s for c in decision.candidates if c.feasible]
    broken = [c for c in decision.candidates if not c.feasible]
    if not broken:
        return ()
    fastest = min(broken, key=lambda c: c.makespan_s)
    return fastest.violated if not feasible or fastest.makespan_s < min(feasible) else ()


def explain(decision: Decision) -> str:
    """An aligned table of the candidates (seconds), the selected one marked `>`, and the reasons below it.

    `printed` is the makespan by eqs. (1)-(3) as printed; the terms belong to the model that decided. `again` is the
    part of prefill that evicted prefixes cause, and `path` the longer one.
    """
    rows = [_COLUMNS, *(_row(c, c.configuration == decision.selected) for c in decision.candidates)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, 1, len(_COLUMNS) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    left_out = decision.considered - len(decision.candidates)
    if left_out > 0:
        lines.append(f"   ... {left_out} more")
    lines.append(_verdict(decision))
    lines += [f"- {words}" for words in decision.limits]
    return "\n".join(lines)


def _row(candidate: Candidate, selected: bool) -> tuple[str, ...]:
    terms: MakespanTerms = candidate.predicted
    broken = (
        f"{terms.bottleneck}, breaks {' and '.join(candidate.violated)}" if candidate.violated else terms.bottleneck
    )
    numbers = (
        terms.total_s,
        candidate.printed.total_s,
        terms.prefill_s,
        terms.decode_s,
        terms.transfer_s,
        terms.overhead_s,
        terms.environment_s,
        terms.reprefill_s,
    )
    return (">" if selected else "", str(candidate.configuration), *(f"{n:.2f}" for n in numbers), broken)


def _verdict(decision: Decision) -> str:
    text = f"{decision.selected} for {decision.budget_workers} workers ({decision.reason})"
    if decision.previous is None:
        return text
    return (
        f"{text}; was {decision.previous}: the best saves {decision.gain_s:.2f} s a batch, threshold "
        f"{decision.threshold:.0%}, switch {decision.switch} at {decision.switching_cost_s:.2f} s"
    )
