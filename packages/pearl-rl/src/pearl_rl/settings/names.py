"""Values that are one of several names, or `module:attribute` of something of the user's own."""

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
