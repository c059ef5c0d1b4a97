"""A sandbox for chat templates, which are third-party code: no escape, and bounded work.

jinja2's own sandbox refuses attributes that lead out of it; here every loop, call and operation
also spends a budget, so that a template cannot exhaust time or memory either.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from jinja2 import Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000
"""Steps of one rendering: loop iterations, macro calls, elements and thousands of characters."""
MAX_CHARS = 1 << 26
"""Longest text that an operation may produce."""
MAX_NUMBER = 1_000_000
"""Largest count or width."""
WIDE_FORMAT = re.compile(r"%[-#0 +]*(?:\*|[0-9]*\.?[0-9]{7,})|\{[^{}]*:[^{}]*[0-9]{7,}")
"""A width or precision of millions, or one that is given as an argument."""
NESTED_FORMAT = re.compile(r"\{[^{}]*\{")
NON_TEXT_FILTERS = frozenset(
    ("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last")
    + ("length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse")
    + ("select", "selectattr", "slice", "sort", "sum", "unique")
)
"""Filters that do not turn their arguments into text."""
COUNT, CHECK = "__count", "__check"


class BudgetExceeded(SecurityError):
    """A template needs more steps or memory than any conversation does."""


class _Template(Template):
    """A template that starts every rendering with a full budget."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render one text."""
        self.environment.reset_budget()  # type: ignore[attr-defined]
        return super().render(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders one text at a time, within MAX_STEPS and MAX_CHARS."""

    template_class = _Template
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._output, **options)
        self._remaining = MAX_STEPS
        self.filters = {name: self.guarded(name, found) for name, found in self.filters.items()}
        self.filters |= {COUNT: self._count, CHECK: self._check}
        self.globals["range"] = self._range
        del self.globals["lipsum"]  # produces any amount of text

    def reset_budget(self) -> None:
        """Give the next rendering a full budget."""
        self._remaining = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Subtract steps from the budget."""
        self._remaining -= steps
        if self._remaining < 0:
            raise BudgetExceeded(f"it takes more than {MAX_STEPS} steps")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operation whose result would be too large, before it runs."""
        self.spend(1)
        if operator == "**":
            _check_small(left, right)
            if abs(right) > 64:
                raise BudgetExceeded("it raises a number to a power above 64")
        elif operator == "*":
            sized = [value for value in (left, right) if hasattr(value, "__len__")]
            times = [value for value in (left, right) if isinstance(value, int)]
            self._spend_chars(len(sized[0]) * max(1, *times) if sized and times else 0)
            if not sized:
                _check_small(left, right, most=1 << 512)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._spend_chars(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Check the arguments of a text's method before the call."""
        self.spend(1)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            args = tuple(map(self._materialize, args))
            self._check_call(function.__name__, (owner, *args), kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Check the arguments of str.format before the call."""
        found = super().wrap_str_format(value)
        if found is None:
            return None

        @functools.wraps(found)
        def checked(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, (args, kwargs))
            if NESTED_FORMAT.search(value.__self__):
                _check_small(*args, *kwargs.values())
            return found(*args, **kwargs)

        return checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        found: nodes.Template = _BudgetInjector().visit(tree)
        found.set_environment(self)
        return found

    def guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that checks its arguments first."""
        has_context = getattr(function, "jinja_pass_arg", None) is not None

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.spend(1)
            if name not in NON_TEXT_FILTERS:
                args = tuple(map(self._materialize, args))
            self._check_call(name, args[has_context:], kwargs)
            return function(*args, **kwargs)

        return guarded

    def _materialize(self, value: Any) -> Any:
        """Turn an iterator, which cannot be measured, into a list."""
        if not hasattr(value, "__next__"):
            return value
        found = []
        for element in value:
            self.spend(1)
            found.append(element)
        return found

    def _check_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a filter or a method whose result would be too large."""
        given = (*args[1:], *kwargs.values())
        _check_small(*given)
        if name not in NON_TEXT_FILTERS:
            self._measure(args)
        texts = [value for value in given if isinstance(value, str)]
        size = len(args[0]) if args and isinstance(args[0], str) else 0
        if name == "replace" and len(texts) > 1:
            self._spend_chars(size // max(1, len(texts[0])) * len(texts[1]) + size)
        elif name == "indent":
            width = max([4, *(value for value in given if type(value) is int), *map(len, texts)])
            self._spend_chars(size + str(args[0]).count("\n") * width)
        elif name == "join":
            joined = args[1] if isinstance(args[0], str) and len(args) > 1 else args[0]
            count = len(joined) if hasattr(joined, "__len__") else 0
            self._spend_chars(count * max([size, *map(len, texts)]))
        elif name == "format":
            self._check_format(str(args[0]), given)

    def _check_format(self, form: str, given: Any) -> None:
        self._measure(given)
        if WIDE_FORMAT.search(form):
            raise BudgetExceeded("it formats a text with a width of millions")

    def _range(self, *args: int) -> range:
        found = range(*args)
        self.spend(len(found) if len(found) < MAX_STEPS else MAX_STEPS + 1)
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
        """Spend what rendering all this as text would cost."""
        pending = [value]
        while pending:
            one = pending.pop()
            self.spend(1)
            if isinstance(one, str):
                self._spend_chars(len(one))
            elif isinstance(one, dict):
                pending.extend(one)
                pending.extend(one.values())
            elif isinstance(one, list | tuple | set):
                self.spend(len(one))
                pending.extend(one)

    def _spend_chars(self, chars: int) -> None:
        if chars > MAX_CHARS:
            raise BudgetExceeded(f"it produces a text of more than {MAX_CHARS} characters")
        self.spend(chars >> 10)


class _BudgetInjector(NodeTransformer):
    """Counts every loop iteration and macro call, and checks concatenated texts."""

    def _counted(self, node: Any) -> Any:
        self.generic_visit(node)
        count = nodes.Filter(nodes.Const(None), COUNT, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Check the operands of ~."""
        self.generic_visit(node)
        parts = [nodes.Filter(part, CHECK, [], [], None, None) for part in node.nodes]
        return nodes.Concat(parts, lineno=node.lineno)


def _check_small(*values: Any, most: int = MAX_NUMBER) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > most:
            raise BudgetExceeded(f"it uses numbers above {MAX_NUMBER}")
