"""Imports of our own modules and references like "mindspeed.ops.x:name" resolve, lazy ones too."""

import ast
import functools
import re

from tests.conventions.source import ROOT, Source, assert_none, sources

OURS = re.compile(r"(mindspeed|mindspeed_llm|mindspeed_mm|tests)(\.|$)")
REFERENCE = re.compile(r"((?:mindspeed|mindspeed_llm|mindspeed_mm)(?:\.\w+)+):(\w+)")
FOLDERS = ("mindspeed", "mindspeed_llm", "mindspeed_mm", "tests", "benchmarks", "examples")


@functools.cache
def defined(module: str) -> frozenset[str] | None:
    """Return the names that a module defines, None if it answers to any, raise if there is none."""
    base = ROOT.joinpath(*module.split("."))
    path = next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()), None)
    if path is None:
        if not base.is_dir():
            raise LookupError(f"no module {module}")
        return frozenset()
    names = frozenset(_names(ast.parse(path.read_text(encoding="utf-8")).body))
    return None if "__getattr__" in names else names


def _names(body):
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for target in filter(None, targets):
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
        for part in ("body", "orelse", "finalbody", "handlers"):
            yield from _names(getattr(node, part, ()))


def missing(module: str, name: str = "") -> str | None:
    try:
        names = defined(module)
        if not name or name == "*" or names is None or name in names:
            return None
        defined(f"{module}.{name}")
    except LookupError as error:
        return f"{error}" if not name or f"{error}".endswith(f" {module}") else f"{module}:{name}"
    return None


def references(source: Source):
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and OURS.match(node.module):
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name, "") for a in node.names if OURS.match(a.name))
        elif source.path.parts[0] != "tests" and (found := REFERENCE.match(text(node, source))):
            yield node.lineno, found[1], found[2]


def text(node: ast.AST, source: Source) -> str:
    """Return the text of a literal; an f-string may begin with a constant of its module."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return ""
    constants = {
        ast.unparse(each.targets[0]): each.value.value
        for each in source.tree.body
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)
    }
    parts = [
        constants.get(ast.unparse(part.value), "")
        if isinstance(part, ast.FormattedValue)
        else part.value
        for part in node.values
    ]
    return "".join(map(str, parts))


def unresolved():
    for source in sources(*FOLDERS):
        for line, module, name in references(source):
            if (gone := missing(module, name)) is not None:
                yield f"{source.name}:{line}: {gone} does not exist"


def test_references_resolve():
    assert_none(unresolved())


def test_the_check_finds_what_is_missing():
    assert missing("mindspeed.ops.nothing") == "no module mindspeed.ops.nothing"
    assert missing("mindspeed.ops.swiglu", "nothing") == "mindspeed.ops.swiglu:nothing"
    assert missing("mindspeed.ops.swiglu", "swiglu") is None
