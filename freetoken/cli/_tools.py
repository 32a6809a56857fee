"""Local tools that `ft chat` and `ft demo` offer to the model: real ones, safe to run unasked.

A tool takes the call's arguments and returns text; what goes wrong is text too, so that the model can
read it. Nothing here touches the user's files, network or processes.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from freetoken.chat.conversation import Tool, parse_arguments
from freetoken.cli._dictionary import DEFINE, LOOKUP, PARAMETER_OF, look_up

_MAX_CHARS, _MAX_DIGITS, _MAX_DEPTH = 200, 40, 20
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

CALCULATOR = Tool(
    name="calculator",
    description="Evaluate a math expression",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "A math expression, e.g. 2 + 3"}},
        "required": ["expression"],
    },
)
OFFERED = (CALCULATOR, DEFINE, LOOKUP)


def run_tool(name: str, arguments_text: str) -> str:
    """Run a call by name; unknown tools and bad arguments come back as a sentence."""
    parameter = {CALCULATOR.name: "expression", **PARAMETER_OF}.get(name)
    if parameter is None:
        return f"error: there is no tool {name}"
    arguments = parse_arguments(arguments_text)
    if not isinstance(arguments, dict) or parameter not in arguments:
        return f"error: {name} needs {parameter}"
    asked = str(arguments[parameter])
    if name in PARAMETER_OF:
        return look_up(asked, with_word=name == DEFINE.name)
    try:
        return calculate(asked)
    except (ValueError, SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as e:
        return f"error: {e}"


def calculate(expression: str) -> str:
    """Evaluate + - * / // % ** and parentheses over numbers; ValueError for anything else."""
    if len(expression) > _MAX_CHARS:
        raise ValueError("the expression is too long")
    text = expression.replace("^", "**").replace("×", "*").replace("÷", "/").replace(",", "")
    value = _value(ast.parse(text.strip(), mode="eval").body, 0)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _value(node: ast.expr, depth: int) -> int | float:
    if depth > _MAX_DEPTH:
        raise ValueError("the expression is nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = _value(node.operand, depth + 1)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if isinstance(node.op, ast.Pow) and (abs(right) > 64 or abs(left) > 1e6):
            raise ValueError("the power is too large")
        result = _OPERATORS[type(node.op)](left, right)
        if isinstance(result, complex) or abs(result) > 10.0**_MAX_DIGITS:
            raise ValueError("the result is out of range")
        return result  # type: ignore[no-any-return]
    raise ValueError("only numbers and + - * / ** ( ) are understood")
