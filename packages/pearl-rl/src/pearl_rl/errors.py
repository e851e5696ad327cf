"""What a command may end with: exit codes, and the one error that becomes one line on standard error."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `pearl-rl`."""

    OK = 0
    CONFIG = 2
    """Settings, arguments or input files are wrong, or something that is needed is not installed."""
    INFEASIBLE = 3
    """The question is well put, but nothing meets its constraints."""
    TIMEOUT = 4
    """The wall limit ended the run."""
    PARTIAL = 5
    """The run ended early (stopped by a person, or with fewer steps than asked); what it has is in the run folder."""


class CommandError(Exception):
    """Ends a command with one line on standard error and an exit code, without a traceback.

    The message says what, which value, which rule, and what to do.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.CONFIG) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


class SettingsError(CommandError):
    """Settings that cannot be used: unknown key, value out of range, fields that contradict each other."""
