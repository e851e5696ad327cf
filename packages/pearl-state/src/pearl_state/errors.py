"""Errors of the state package: each says which rule was broken, by what, and what was there."""


class StateError(Exception):
    """Base of every error that pearl-state raises."""


class IllegalTransitionError(StateError):
    """A lifecycle change that `lifecycle.TRANSITIONS` does not list."""


class InvariantError(StateError):
    """A table that a named invariant forbids. `invariant` is the name."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class ConfigurationError(StateError, ValueError):
    """A configuration (N_P, N_D, N_C) that is neither fully colocated nor fully disaggregated, or text that is none."""


class ProfileError(StateError, ValueError):
    """A profile field that is not a finite number in its range."""
