"""Policies of other people's: `package.module:attribute` names one, wherever settings take a policy's name."""

import importlib
import os
import sys
from typing import Any

from pearl_planner.policies import Policy

_NEEDS = ("name", "expands", "borrows", "decide")


class PolicyError(ValueError):
    """A name that leads to no policy: says which part of it is missing."""


def own_policy(name: str) -> Policy:
    """The policy that `package.module:attribute` names: an instance, or a class or function that makes one.

    Raises `PolicyError` where the module cannot be imported or what it holds is no policy.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise PolicyError(f"policy '{name}' is not like package.module:attribute")
    # A command does not look into the folder it was called from, where a policy under development is.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise PolicyError(f"policy '{name}' cannot be imported: {error}") from error
    except AttributeError as error:
        raise PolicyError(f"policy '{name}': {module_name} has no '{attribute}'") from error
    try:
        policy = found() if isinstance(found, type) or not hasattr(found, "decide") else found
    except TypeError as error:
        raise PolicyError(f"policy '{name}' cannot be made without arguments: {error}") from error
    missing = [need for need in _NEEDS if not hasattr(policy, need)]
    if missing:
        raise PolicyError(f"policy '{name}' has no {', '.join(missing)}; see pearl_planner.policies.Policy")
    return policy  # type: ignore[no-any-return]
