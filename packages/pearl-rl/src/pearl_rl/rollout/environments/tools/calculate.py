"""The calculator tool: evaluates an arithmetic expression, and nothing else.

Runs in a sandbox process under `python -I -S`: standard library only, nothing imported from this project.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 200
"""Characters of an expression."""
LARGEST = 10**12
"""Largest magnitude of any intermediate value."""

Number = int | float

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
"""No powers and no shifts: a short expression must not take long, nor a lot of memory."""


class Refused(Exception):
    """The expression is not one that the calculator takes; the text says why."""


def value_of(node: ast.expr) -> Number:
    """Value of a parsed expression. Raises `Refused`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = value_of(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        try:
            return _checked(BINARY[type(node.op)](value_of(node.left), value_of(node.right)))
        except ZeroDivisionError:
            raise Refused("division by zero") from None
    raise Refused("only numbers and + - * / // % ( )")


def text_of(value: Number) -> str:
    """Whole numbers without a point, others with at most six decimals."""
    return str(int(value)) if value == int(value) else f"{value:.6f}".rstrip("0")


def run(argument: dict[str, Any]) -> dict[str, str]:
    """Takes `expression`; gives `result`, or `mistake` where the expression cannot be evaluated."""
    expression = str(argument["expression"])
    if len(expression) > LONGEST:
        return {"mistake": "expression too long"}
    try:
        return {"result": text_of(value_of(ast.parse(expression, mode="eval").body))}
    except Refused as refused:
        return {"mistake": str(refused)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {"mistake": "not an expression"}


def _checked(value: Number) -> Number:
    # The comparison is false for NaN too.
    if not abs(value) <= LARGEST:
        raise Refused("number too large")
    return value
