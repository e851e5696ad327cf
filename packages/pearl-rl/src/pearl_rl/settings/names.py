"""Names of policies: which there are, or `module:attribute` of the user's own, and what a name turns on."""

import re

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def named_policy(*names: str) -> AfterValidator:
    """Accepts one of `names` or `package.module:attribute`."""
    known = ", ".join(f"'{name}'" for name in names)

    def check(value: str) -> str:
        if value not in names and not _OWN.fullmatch(value):
            raise PydanticCustomError("policy_name", f"must be {known}, or a policy of your own, module:attribute")
        return value

    return AfterValidator(check)


def with_tiderl(policy: str) -> bool:
    """Whether a policy turns continuous injection, task batching and readiness on where each is left to the policy."""
    return policy.split("+")[-1] == "tiderl"


def injects_continuously(injection: str, policy: str) -> bool:
    """Whether groups enter as the staleness bound allows: as `rollout.injection` says, else as the policy does.

    Both as settings ("auto") and scenarios ("") spell them.
    """
    return injection == "continuous" or (injection in ("", "auto") and with_tiderl(policy))
