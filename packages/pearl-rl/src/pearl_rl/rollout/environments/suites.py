"""Environments by name. The registry is a dict; a name with a colon is a suite of your own."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from pearl_rl.rollout.environments.arguments import nearest
from pearl_rl.rollout.environments.protocol import EnvironmentSettingsError, EnvironmentSuite

SuiteFactory = Callable[[Mapping[str, Any]], EnvironmentSuite]


def _bisect(arguments: Mapping[str, Any]) -> EnvironmentSuite:
    from pearl_rl.rollout.environments.bisect_environment import BisectSuite

    return BisectSuite.build(arguments)


def _calculator(arguments: Mapping[str, Any]) -> EnvironmentSuite:
    from pearl_rl.rollout.environments.calculator import CalculatorSuite

    return CalculatorSuite.build(arguments)


def _gymnasium(arguments: Mapping[str, Any]) -> EnvironmentSuite:
    from pearl_rl.rollout.environments.gymnasium_adapter import GymnasiumSuite

    return GymnasiumSuite.build(arguments)


def _http(arguments: Mapping[str, Any]) -> EnvironmentSuite:
    from pearl_rl.rollout.environments.http_environment import HttpSuite

    return HttpSuite.build(arguments)


def _repair(arguments: Mapping[str, Any]) -> EnvironmentSuite:
    from pearl_rl.rollout.environments.repair import RepairSuite

    return RepairSuite.build(arguments)


def _verifiers(arguments: Mapping[str, Any]) -> EnvironmentSuite:
    from pearl_rl.rollout.environments.verifiers_adapter import VerifiersSuite

    return VerifiersSuite.build(arguments)


SUITES: Final[dict[str, SuiteFactory]] = {
    "bisect": _bisect,
    "calculator": _calculator,
    "gymnasium": _gymnasium,
    "http": _http,
    "repair": _repair,
    "verifiers": _verifiers,
}
"""Name → factory. Each imports its module only when it is called."""


def make_suite(name: str, arguments: Mapping[str, Any]) -> EnvironmentSuite:
    """The environment suite `name`; starts nothing. Raises `EnvironmentSettingsError`.

    `package.module:attribute` names a factory that takes the arguments, or a suite class with `build`.
    """
    if ":" in name:
        return _imported(name)(arguments)
    if name not in SUITES:
        raise EnvironmentSettingsError(f"unknown environment {name!r}; {nearest(name, SUITES)}")
    return SUITES[name](arguments)


def _imported(name: str) -> SuiteFactory:
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise EnvironmentSettingsError(f"environment {name!r} cannot be imported: {error}") from error
    except AttributeError as error:
        raise EnvironmentSettingsError(f"environment {name!r}: {module_name} has no {attribute!r}") from error
    factory = getattr(found, "build", found)
    if not callable(factory):
        raise EnvironmentSettingsError(f"environment {name!r} must be a function or a class with `build`")
    return factory  # type: ignore[no-any-return]
