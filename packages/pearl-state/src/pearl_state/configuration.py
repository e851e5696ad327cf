"""A target configuration, π = (N_P, N_D, N_C) of PEARL section 4.2, with the text forms `2P3D` and `4C`."""

import re
from dataclasses import dataclass

from pearl_state.errors import ConfigurationError
from pearl_state.roles import Mode, Role

_TEXT = re.compile(r"(?:(?P<p>\d+)P(?P<d>\d+)D|(?P<c>\d+)C)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """How many active rollout workers hold each role: fully colocated, fully disaggregated, or empty (`0C`)."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for negative counts, a mixture, or prefill without decode."""
        if self.prefill < 0 or self.decode < 0 or self.colocated < 0:
            raise ConfigurationError(f"negative worker count in {self}")
        if self.colocated and (self.prefill or self.decode):
            raise ConfigurationError(f"mixes colocated with disaggregated workers: {self}")
        if bool(self.prefill) != bool(self.decode):
            raise ConfigurationError(f"prefill needs decode, and decode prefill: {self}")

    @classmethod
    def parse(cls, text: str) -> "Configuration":
        """Read `2P3D` or `4C`. Raises `ConfigurationError` for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ConfigurationError(f"configuration '{text}' is not like '2P3D' or '4C'")
        if match["c"] is not None:
            return cls(colocated=int(match["c"]))
        return cls(prefill=int(match["p"]), decode=int(match["d"]))

    @property
    def workers(self) -> int:
        """The number of rollout workers, N_k."""
        return self.prefill + self.decode + self.colocated

    @property
    def mode(self) -> Mode:
        """Colocation or disaggregation; an empty configuration counts as colocation."""
        return Mode.DISAGGREGATION if self.prefill else Mode.COLOCATION

    def count(self, role: Role) -> int:
        """How many workers hold `role`; 0 for training."""
        match role:
            case Role.PREFILL:
                return self.prefill
            case Role.DECODE:
                return self.decode
            case Role.COLOCATED:
                return self.colocated
            case Role.TRAINING:
                return 0

    def __str__(self) -> str:
        """The text form that `parse` reads."""
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.colocated}C"
