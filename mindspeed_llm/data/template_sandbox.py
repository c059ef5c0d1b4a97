"""A sandbox for chat templates, which come with models of others: no way out, and no endless work.

jinja2's own sandbox refuses attributes that lead out of it; here every loop, call and operation
also draws on a budget, so that a template cannot take all time or memory either.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from jinja2 import Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

STEPS = 2_000_000
"""Steps of one rendering: rounds of loops, calls of macros, elements and thousands of letters."""
LETTERS = 1 << 26
"""Longest text that an operation may make."""
NUMBER = 1_000_000
"""Largest number that may say how often or how wide."""
WIDE = re.compile(r"%[-#0 +]*(?:\*|[0-9]*\.?[0-9]{7,})|\{[^{}]*:[^{}]*[0-9]{7,}")
"""A width or precision of millions, or one that is given as an argument."""
DEEP_FORMAT = re.compile(r"\{[^{}]*\{")
LISTS = frozenset(
    ("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last")
    + ("length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse")
    + ("select", "selectattr", "slice", "sort", "sum", "unique")
)
"""Filters that make no text of what they are given."""
COUNT, CHECK = "__count", "__check"


class TooMuch(SecurityError):
    """A template wants more than a conversation can need."""


class _Template(Template):
    """A template that begins every rendering with a whole budget."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Write one text."""
        self.environment.begin()  # type: ignore[attr-defined]
        return super().render(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders one text at a time, within STEPS and LETTERS."""

    template_class = _Template
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._output, **options)
        self._left = STEPS
        self.filters = {name: self.guarded(name, found) for name, found in self.filters.items()}
        self.filters |= {COUNT: self._count, CHECK: self._check}
        self.globals["range"] = self._range
        del self.globals["lipsum"]  # makes as much text as it is asked for

    def begin(self) -> None:
        """Give the next rendering a whole budget."""
        self._left = STEPS

    def spend(self, steps: int) -> None:
        """Take steps off the budget."""
        self._left -= steps
        if self._left < 0:
            raise TooMuch(f"it takes more than {STEPS} steps")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operation whose result would be too large, before it is done."""
        self.spend(1)
        if operator == "**":
            _must_be_small(left, right)
            if abs(right) > 64:
                raise TooMuch("it raises a number to a power above 64")
        elif operator == "*":
            sized = [value for value in (left, right) if hasattr(value, "__len__")]
            times = [value for value in (left, right) if isinstance(value, int)]
            self._spend_text(len(sized[0]) * max(1, *times) if sized and times else 0)
            if not sized:
                _must_be_small(left, right, most=1 << 512)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._spend_text(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Look at what a method of a text is given before it is called."""
        self.spend(1)
        of = getattr(function, "__self__", None)
        if isinstance(of, str):
            args = tuple(map(self._whole, args))
            self._look(function.__name__, (of, *args), kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Look at what a text is formatted with."""
        found = super().wrap_str_format(value)
        if found is None:
            return None

        @functools.wraps(found)
        def checked(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, (args, kwargs))
            if DEEP_FORMAT.search(value.__self__):
                _must_be_small(*args, *kwargs.values())
            return found(*args, **kwargs)

        return checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        found: nodes.Template = _Counting().visit(tree)
        found.set_environment(self)
        return found

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that looks at what it is given first."""
        passes = getattr(function, "jinja_pass_arg", None) is not None

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.spend(1)
            if name not in LISTS:
                args = tuple(map(self._whole, args))
            self._look(name, args[passes:], kwargs)
            return function(*args, **kwargs)

        return guarded

    def _whole(self, value: Any) -> Any:
        """Return a list for what would give its elements one by one, and could not be measured."""
        if not hasattr(value, "__next__"):
            return value
        found = []
        for element in value:
            self.spend(1)
            found.append(element)
        return found

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a filter or a method whose result would be too large."""
        given = (*args[1:], *kwargs.values())
        _must_be_small(*given)
        if name not in LISTS:
            self._measure(args)
        texts = [value for value in given if isinstance(value, str)]
        size = len(args[0]) if args and isinstance(args[0], str) else 0
        if name == "replace" and len(texts) > 1:
            self._spend_text(size // max(1, len(texts[0])) * len(texts[1]) + size)
        elif name == "indent":
            width = max([4, *(value for value in given if type(value) is int), *map(len, texts)])
            self._spend_text(size + str(args[0]).count("\n") * width)
        elif name == "join":
            joined = args[1] if isinstance(args[0], str) and len(args) > 1 else args[0]
            count = len(joined) if hasattr(joined, "__len__") else 0
            self._spend_text(count * max([size, *map(len, texts)]))
        elif name == "format":
            self._check_format(str(args[0]), given)

    def _check_format(self, form: str, given: Any) -> None:
        self._measure(given)
        if WIDE.search(form):
            raise TooMuch("it formats a text with a width of millions")

    def _range(self, *args: int) -> range:
        found = range(*args)
        self.spend(len(found) if len(found) < STEPS else STEPS + 1)
        return found

    def _count(self, value: Any) -> None:
        self.spend(1)

    def _check(self, value: Any) -> Any:
        self._measure(value)
        return value

    def _output(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._measure(value)
        return value

    def _measure(self, value: Any) -> None:
        """Draw what a text of all this would be on the budget."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            self.spend(1)
            if isinstance(one, str):
                self._spend_text(len(one))
            elif isinstance(one, dict):
                waiting.extend(one)
                waiting.extend(one.values())
            elif isinstance(one, list | tuple | set):
                self.spend(len(one))
                waiting.extend(one)

    def _spend_text(self, letters: int) -> None:
        if letters > LETTERS:
            raise TooMuch(f"it makes a text of more than {LETTERS} letters")
        self.spend(letters >> 10)


class _Counting(NodeTransformer):
    """Lets every round of a loop and every call of a macro count, and looks at joined texts."""

    def _counted(self, node: Any) -> Any:
        self.generic_visit(node)
        count = nodes.Filter(nodes.Const(None), COUNT, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Look at what was joined by ~."""
        self.generic_visit(node)
        parts = [nodes.Filter(part, CHECK, [], [], None, None) for part in node.nodes]
        return nodes.Concat(parts, lineno=node.lineno)


def _must_be_small(*values: Any, most: int = NUMBER) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > most:
            raise TooMuch(f"it works with numbers above {NUMBER}")
