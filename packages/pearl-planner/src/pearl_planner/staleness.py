"""Which groups an update must wait for, so that none becomes older than the staleness bound allows. Pure.

The bound η admits what the next η + 1 updates can take (TideRL section 4.1), and no more. So it does not do to look
only at the groups that this update is the last to take: where it takes young ones while many old ones are incomplete,
more of those are left than the updates that still may take them will take, and the rest is thrown away however soon it
is complete. After each update, of all that is left, at most k · n groups may be among those for which k further updates
remain, n being what one update takes. Where one cohort fills the bound, as at the beginning of a run, that means that
its groups go first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pearl_state.trajectory import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeingGroup:
    """A group that is not trained on yet."""

    id: GroupId
    later: int
    """Updates after the next one that may still take it; 0 or less: the next one must."""
    missing: int = 0
    """Samples until it is complete; an update takes complete groups only."""


def awaited(groups: Sequence[AgeingGroup], per_update: int) -> tuple[GroupId, ...]:
    """The incomplete groups that the next update must wait for; it takes the first `per_update` complete ones.

    `groups` come in the order in which they were opened. All that the next update must take are awaited; beyond them
    only as many as would take the place of younger ones, those with the least missing first.
    """
    complete = [group for group in groups if not group.missing]
    taken = complete[:per_update]
    open_ = sorted((group for group in groups if group.missing), key=lambda group: (group.later, group.missing))
    found = 0
    for later in sorted({group.later for group in open_}):
        within = sum(group.later <= later for group in open_)
        if later <= 0:
            found = within
            continue
        left = within + sum(group.later <= later for group in complete[per_update:])
        replaceable = per_update - sum(group.later <= later for group in taken)
        found = max(found, min(within, left - later * per_update, replaceable))
    return tuple(group.id for group in open_[:found])
