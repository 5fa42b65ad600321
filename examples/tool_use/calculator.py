"""A calculator that a model may be handed: it reads an expression with `ast` and computes what is on a short list.

Nothing is evaluated by Python: no names, no calls, no attributes, no powers, no strings. Length, depth and size are
bounded, so that no expression takes long.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

MAX_LENGTH = 100  # characters
MAX_DEPTH = 30  # operators and brackets inside each other
MAX_VALUE = 10**15  # of every number on the way

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> int:
    "The value of whole numbers with + - * // % and brackets; raises `ValueError`, which says what is wrong."
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH} characters")
    if not re.fullmatch(r"[0-9+\-*/%() ]+", expression):
        raise ValueError("only whole numbers and + - * // % ( )")
    if expression.count("(") > MAX_DEPTH:
        raise ValueError("too many brackets")
    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("cannot be read") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def value_of(node: ast.expr, depth: int = 0) -> int:
    "The value of one node of the tree, if it is on the list."
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in (ast.USub, ast.UAdd):
        sign = -1 if isinstance(node.op, ast.USub) else 1
        value = sign * value_of(node.operand, depth + 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](
            value_of(node.left, depth + 1), value_of(node.right, depth + 1)
        )
    else:
        raise ValueError("only whole numbers and + - * // % ( )")
    if abs(value) > MAX_VALUE:
        raise ValueError("too large")
    return value


def respond(expression: str) -> str:
    "What the tool replies: the value, or why there is none."
    try:
        return f"= {calculate(expression)}"
    except ValueError as error:
        return f"error: {error}"
