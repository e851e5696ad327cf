"""Policies of other people's: `package.module:attribute` names one, wherever settings take a policy's name."""

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Unpack

from pearl_planner import find_gpu, find_model, find_profile, planning_inputs
from pearl_planner.decide import decide, scaled
from pearl_planner.in_step import InStepPolicy
from pearl_planner.policies import Observing, Policy, Question, Recalling
from pearl_planner.switching import SwitchCosts
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, SwitchKind

_NEEDS = ("name", "expands", "borrows", "decide")
_LEFT_OUT: Mapping[str, Any] = {
    name: parameter.default
    for name, parameter in signature(decide).parameters.items()
    if name in Question.__optional_keys__
}
"""What an argument that is left out of a question is."""
_TRIED_WORKERS = (1, 2, 5, 8)
_TRIED_PINS = (Configuration(prefill=4, decode=1), Configuration(colocated=4))


class PolicyError(ValueError):
    """A name that leads to no policy, or a policy that fails: says which part of it, and where."""


def own_policy(name: str) -> Policy:
    """The policy that `package.module:attribute` names: an instance, or a class or function that makes one.

    It is asked for a few numbers of workers and pins at once, so that a mistake shows before anything has started;
    whatever it does wrong later is a `PolicyError` too, but for one that is an `InStepPolicy`. Raises `PolicyError`
    where the module cannot be imported, what it holds is no policy, or its answers are none.
    """
    policy = _made(name)
    _check_parts(policy, name)
    # One of PEARL's own with other settings needs no watching, and others look at its type.
    if getattr(getattr(type(policy), "decide", None), "__module__", "").startswith("pearl_planner."):
        return policy  # type: ignore[no-any-return]
    watched = _watched(policy, name)
    _try(watched)
    # Forecasts are made and asked about by this type alone.
    return policy if isinstance(policy, InStepPolicy) else watched


def _check_parts(policy: Any, name: str) -> None:
    """Raise `PolicyError` where one of a policy's parts is missing, or no such thing."""
    try:
        missing = [need for need in _NEEDS if not hasattr(policy, need)]
        wrong = [
            f"{need} = {getattr(policy, need)!r}, which is no {kind.__name__}"
            for need, kind in (("name", str), ("expands", bool), ("borrows", bool))
            if need not in missing and not isinstance(getattr(policy, need), kind)
        ]
    except (Exception, SystemExit) as error:
        where = _where(error, type(policy).__module__)
        raise PolicyError(f"policy '{name}' fails when it is asked what it is: {where}") from error
    if missing:
        raise PolicyError(f"policy '{name}' has no {', '.join(missing)}; docs/policies.md says what each is")
    if wrong:
        raise PolicyError(f"policy '{name}' has {wrong[0]}; docs/policies.md says what each is")


def _made(name: str) -> Any:
    """What `name` leads to, called where it is a class or function."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise PolicyError(f"policy '{name}' is not like package.module:attribute")
    # A command does not look into the folder it was called from, where a policy under development is.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy '{name}' cannot be imported: {_import_failure(error, module_name)}") from error
    if not hasattr(module, attribute):
        raise PolicyError(f"policy '{name}': {module_name} has no '{attribute}'")
    found = getattr(module, attribute)
    if not isinstance(found, type) and (hasattr(found, "decide") or not callable(found)):
        return found
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy '{name}' cannot be made without arguments: {_where(error, module_name)}") from error


def _import_failure(error: BaseException, module_name: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        hint = "; give the module's name without .py" if module_name.endswith(".py") else ""
        return f"no module '{error.name}' in {os.getcwd()}, nor installed; call from the folder that holds it{hint}"
    if isinstance(error, ModuleNotFoundError) and module_name.endswith(".py"):
        return "give the module's name without .py"
    return str(error) if isinstance(error, ImportError) else _where(error, module_name)


def _where(error: BaseException, module_name: str) -> str:
    """The error in a line, with the line of the policy's module that led to it."""
    text = f"{type(error).__name__}: {error}"
    # A module whose import failed is not among those that are loaded.
    tail = os.path.join("", *module_name.split(".")) + ".py"
    file = getattr(sys.modules.get(module_name), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(f.filename, f.lineno) for f in frames if f.filename == file or f.filename.endswith(os.sep + tail)]
    return f"{text} ({os.path.relpath(lines[-1][0])}, line {lines[-1][1]})" if lines else text


@dataclass(frozen=True)
class _Watched:
    """A policy whose failures carry its name, and whose answers are checked to be some."""

    policy: Policy
    called: str

    @property
    def name(self) -> str:
        """As the policy's."""
        return self.policy.name

    @property
    def expands(self) -> bool:
        """As the policy's."""
        return self.policy.expands

    @property
    def borrows(self) -> bool:
        """As the policy's."""
        return self.policy.borrows

    def decide(self, **asked: Unpack[Question]) -> Decision:
        """As the policy's, which gets every argument.

        Raises `PolicyError` where that raises, or answers another question.
        """
        try:
            decision: Any = self.policy.decide(**{**_LEFT_OUT, **asked})
        except (Exception, SystemExit) as error:
            where = _where(error, type(self.policy).__module__)
            raise PolicyError(f"policy '{self.called}' fails when it decides: {where}") from error
        if not isinstance(decision, Decision):
            raise PolicyError(
                f"policy '{self.called}' answers with {type(decision).__name__}, not with a Decision; "
                "return pearl_planner.decide(…, pinned=your configuration)"
            )
        workers = asked["budget_workers"]
        if decision.selected.workers != workers:
            raise PolicyError(
                f"policy '{self.called}' answers with {decision.selected} where {workers} workers are to be placed; "
                "it must place every one of budget_workers"
            )
        pinned = asked.get("pinned")
        if pinned is not None and decision.selected != scaled(pinned, workers):
            raise PolicyError(
                f"policy '{self.called}' answers with {decision.selected} for {workers} workers where a person pinned "
                f"{pinned}; it must hold what is pinned: "
                "return pearl_planner.decide(…, pinned=pinned or your configuration)"
            )
        return decision


class _WatchedObserving(_Watched):
    """One that learns what switches cost."""

    def observing(self, kind: SwitchKind, seconds: float) -> Policy:
        """See `Observing`."""
        assert isinstance(self.policy, Observing)
        return _watched(self.policy.observing(kind, seconds), self.called)


class _WatchedRecalling(_WatchedObserving):
    """One whose learned costs a journal keeps."""

    @property
    def costs(self) -> SwitchCosts:
        """See `Recalling`."""
        assert isinstance(self.policy, Recalling)
        return self.policy.costs

    def recalling(self, costs: SwitchCosts) -> Policy:
        """See `Recalling`."""
        assert isinstance(self.policy, Recalling)
        return _watched(self.policy.recalling(costs), self.called)


def _watched(policy: Policy, called: str) -> _Watched:
    if isinstance(policy, Recalling):
        return _WatchedRecalling(policy, called)
    return (_WatchedObserving if isinstance(policy, Observing) else _Watched)(policy, called)


def _try(policy: Policy) -> None:
    """Ask as the control plane does; a policy is pure, so that leaves nothing behind."""
    inputs = planning_inputs(find_profile("swe-32k"), find_model("qwen3-8b"), find_gpu("h800"), tensor_parallel=2)
    for workers in _TRIED_WORKERS:
        current = None
        for pinned in (None, None, *_TRIED_PINS):
            current = policy.decide(
                workload=inputs.workload,
                platform=inputs.platform,
                budget_workers=workers,
                current=current,
                remaining_fraction=1.0,
                steps_ahead=3.0,
                calibrated=current is not None,
                pinned=pinned,
            ).selected
