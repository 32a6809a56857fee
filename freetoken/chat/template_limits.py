"""Bounds on what a chat template may use up: processor time, text, the size of single values.

A template is code from a checkpoint. Every loop, macro and call is metered, every operation that can
make much out of little is measured before it runs, so no single step is long and a render ends soon
after its time is up, in whatever thread it runs. Knows no template and no message.
Invariant: whatever is exceeded raises TemplateLimit, which no template can catch.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from freetoken.core.units import MIB

MAX_BITS = 4096
MAX_WIDTH = 10_000
_LINEAR = frozenset(
    {
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby"),
        *("int", "items", "last", "length", "list", "map", "max", "min", "random", "reject"),
        *(
            "rejectattr",
            "reverse",
            "round",
            "safe",
            "select",
            "selectattr",
            "slice",
            "sort",
            "trim",
            "unique",
        ),
    }
)
"""Filters whose result is no longer than their input; all others write text and are measured deeply."""
_WIDE = {
    "%": re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d{0,4}\.)?(?:\*|\d{5})"),
    "{": re.compile(r"\{[^{}]*(?:\{|:[^{}]*\d{5})"),
}
_PADS = ("ljust", "rjust", "center", "zfill", "expandtabs")


@dataclass(frozen=True)
class Limits:
    """What one render may use.

    seconds  processor time of its thread, so that a busy machine doesn't fail it
    chars    the longest text; also of what stands between, and the elements of a list
    total    characters and elements made in all
    """

    seconds: float = 3.0
    chars: int = 64 * MIB
    total: int = 256 * MIB


class TemplateLimit(Exception):
    """A template used more than it may; the text says of what."""


class Meter(threading.local):
    """What the render in this thread has used."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.until_s = float("inf")
        self.made = 0

    def start(self) -> None:
        self.until_s = time.thread_time() + self.limits.seconds
        self.made = 0

    def stop(self) -> None:
        self.until_s = float("inf")

    def tick(self) -> bool:
        """Runs in every turn of a loop or macro; True."""
        if time.thread_time() > self.until_s:
            raise TemplateLimit(f"it ran longer than {self.limits.seconds:g} s")
        return True

    def expect(self, size: int) -> None:
        """Refuse a value that would be too large, before it is made; count it if not."""
        self.made += size
        if size > self.limits.chars:
            raise TemplateLimit(f"a value has more than {self.limits.chars} characters")
        if self.made > self.limits.total:
            raise TemplateLimit(f"it made more than {self.limits.total} characters")

    def measure(self, value: Any) -> int:
        """About how many characters a value has as text; nested values count wherever they stand."""
        if isinstance(value, str):
            return len(value)
        size, turns, waiting = 0, 0, [value]
        while waiting:
            one = waiting.pop()
            turns += 1
            if not turns & 1023:
                self.tick()
            if isinstance(one, Mapping):
                waiting += one.keys()
                waiting += one.values()
            elif isinstance(one, Namespace):
                waiting.append(one._Namespace__attrs)
            elif isinstance(one, (list, tuple, set, frozenset)):
                waiting += one
            size += len(one) if isinstance(one, (str, bytes)) else 4
            if size > self.limits.chars or len(waiting) > self.limits.chars:
                raise TemplateLimit(f"a value has more than {self.limits.chars} characters")
        return size


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with a meter. Compile through `metered`, render between `meter.start` and `meter.stop`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options, finalize=self._shown)
        self.meter = Meter(limits)
        self.globals.pop("lipsum", None)

    def meter_filters(self) -> None:
        """Measure what goes through the filters; call it when all are there."""
        for name, function in list(self.filters.items()):
            self.filters[name] = self._measured(name, function)

    def tick(self) -> bool:
        return self.meter.tick()

    def joined(self, *values: Any) -> str:
        """The operator `~`."""
        self.meter.expect(sum(map(self.meter.measure, values)))
        return "".join(map(str, values))

    def literal(self, value: Any) -> Any:
        """A list, tuple or mapping as written. Nesting grows here alone, so all other work stays bounded."""
        self.meter.measure(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.tick()
        if operator == "**":
            _check_bits(_bits(left) * (abs(right) if isinstance(right, int) else 1))
        elif operator == "%" and isinstance(left, str):
            self._expect_format(left, (right,), "%")
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(_bits(left) + _bits(right))
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int):
                self.meter.expect(max(times, 0) * _length(value))
        elif operator == "+":
            self.meter.expect(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.meter.tick()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps format
        if isinstance(owner, str):
            args = __self._text_method(owner, __obj.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(owner, str):
            __self.meter.expect(_length(result))
        return result

    def _text_method(
        self, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Check a method of a text before it runs; returns its arguments, generators read."""
        given = (*args, *kwargs.values())
        size = len(owner)
        if name == "replace":
            size += _replaced(owner, given)
        elif name == "join" and args:
            args = (list(args[0]), *args[1:])
            size = self.meter.measure(args[0]) + len(args[0]) * len(owner)
        elif name in _PADS:
            size += max((n for n in given if isinstance(n, int)), default=8) * (1 + owner.count("\t"))
        elif name in ("format", "format_map"):
            self._expect_format(owner, given, "{")
        elif name == "translate":
            size *= 1 + self.meter.measure(given)
        self.meter.expect(size)
        return args

    def _expect_format(self, form: str, values: tuple[Any, ...], mark: str) -> None:
        """A value may stand in a format several times, and be padded to any width."""
        if _WIDE[mark].search(form):
            raise TemplateLimit(f"a format pads to more than {MAX_WIDTH} characters")
        self.meter.expect(len(form) + form.count(mark) * (MAX_WIDTH + self.meter.measure(values)))

    def _measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passes = getattr(function, "jinja_pass_arg", None) is not None

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            values = (*(args[1:] if passes else args), *kwargs.values())
            if any(isinstance(v, int) and abs(v) > MAX_WIDTH for v in values[1:]):
                raise TemplateLimit(f"the filter {name} was given a number above {MAX_WIDTH}")
            if name not in _LINEAR:
                self.meter.expect(self._written(name, values))
            result = function(*args, **kwargs)
            self.meter.expect(_length(result))
            return result

        return measured

    def _written(self, name: str, values: tuple[Any, ...]) -> int:
        """Characters that a filter may write at most."""
        value, rest = values[0], values[1:]
        size = self.meter.measure(values)
        if name == "replace":
            return size + _replaced(str(value), tuple(map(str, rest)))
        if name == "format":
            self._expect_format(str(value), rest, "%")
        if name in ("join", "indent", "wordwrap", "xmlattr"):
            between = max((len(v) for v in rest if isinstance(v, str)), default=0)
            between += max((v for v in rest if isinstance(v, int)), default=0)
            places = str(value).count("\n") + 1 if isinstance(value, str) else 0
            places = max(places, _length(value) if name != "indent" else 0)
            return size + places * between
        return size

    def _shown(self, value: Any) -> Any:
        """Whatever is written out, before it becomes text."""
        if not isinstance(value, str):
            self.meter.measure(value)
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """What a template, a macro or a block wrote, as one text."""
        size, kept = 0, []
        for part in parts:
            size += len(part)
            if size > self.meter.limits.chars:
                raise TemplateLimit(f"it wrote more than {self.meter.limits.chars} characters")
            kept.append(part)
        self.meter.expect(size)
        return "".join(kept)


def metered(tree: nodes.Template) -> nodes.Template:
    """Put a tick into every loop and macro of a parsed template, literals and `~` under the meter."""
    for loop in list(tree.find_all(nodes.For)):
        loop.body.insert(0, nodes.ExprStmt(_tick(), lineno=loop.lineno))
        if loop.test is not None:
            loop.test = nodes.And(_tick(), loop.test, lineno=loop.lineno)
    blocks: list[nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for macro in blocks:
        macro.body.insert(0, nodes.ExprStmt(_tick(), lineno=macro.lineno))
    _rewrite_children(tree)
    return tree


def _tick() -> nodes.Call:
    return _call("tick", [])


def _call(method: str, args: list[nodes.Expr], lineno: int | None = None) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None, lineno=lineno)


def _rewrite_children(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_rewritten(v) if isinstance(v, nodes.Node) else v for v in value]
        elif isinstance(value, nodes.Node):
            setattr(node, name, _rewritten(value))


def _rewritten(node: nodes.Node) -> nodes.Node:
    _rewrite_children(node)
    if isinstance(node, nodes.Concat):
        return _call("joined", node.nodes, node.lineno)
    if not isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)):
        return node
    is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
    is_constant = next(node.find_all(nodes.Name), None) is None
    return node if is_target or is_constant else _call("literal", [node], node.lineno)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimit(f"a number has more than {MAX_BITS} bits")


def _replaced(text: str, given: tuple[Any, ...]) -> int:
    """Characters that replacing adds at most."""
    if len(given) < 2 or not all(isinstance(v, str) for v in given[:2]):
        return 0
    return text.count(given[0]) * len(given[1])
