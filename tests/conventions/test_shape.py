"""Files and functions stay small, speak through loggers, and start with what they are for."""

import ast

import pytest

from tests.conventions.source import allowed, functions, sources

FILE_LINES, FUNCTION_LINES, KERNEL_LINES, POSITIONAL, DEPTH = 500, 80, 150, 6, 4
EVERY = pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)


def is_kernel(function):
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


@EVERY
def test_a_file_is_short_and_says_what_it_is(source):
    assert source.lines <= FILE_LINES
    assert len(source.path.parts) - 2 <= DEPTH, "too deep"
    if source.tree.body:
        assert ast.get_docstring(source.tree), f"{source.name} has no docstring"


@EVERY
def test_functions_are_short_with_few_positions(source):
    exceptions = allowed("positional")
    for function in functions(source):
        where = f"{source.name}:{function.name}"
        limit = KERNEL_LINES if is_kernel(function) else FUNCTION_LINES
        assert function.end_lineno - function.lineno < limit, f"{where} is too long"
        if is_kernel(function):
            continue  # Triton has no keyword-only parameters
        positions = [*function.args.posonlyargs, *function.args.args]
        count = len([a for a in positions if a.arg not in ("self", "cls", "ctx")])
        assert count <= POSITIONAL or where in exceptions, f"{where} takes {count} positions"


@EVERY
def test_only_commands_print(source):
    if source.room.endswith("/cli"):
        return
    for node in ast.walk(source.tree):
        is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        assert not (is_print and node.func.id == "print"), f"{source.name}:{node.lineno} prints"


@EVERY
def test_no_star_imports_and_no_silenced_errors(source):
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"{source.name}:{node.lineno}"
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name):
            silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            assert not (silent and node.type.id == "Exception"), f"{source.name}:{node.lineno}"


@pytest.mark.parametrize(
    "source", [s for s in sources() if s.path.name == "__init__.py"], ids=lambda s: s.name
)
def test_init_files_only_re_export(source):
    plain = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
    for node in source.tree.body:
        # Names that load at first use are declared for type checkers and served by __getattr__.
        is_lazy = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        is_lazy |= isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
        assert isinstance(node, plain) or is_lazy, f"{source.name}:{node.lineno} has logic"


def test_exceptions_are_still_needed():
    known = {f"{s.name}:{f.name}" for s in sources() for f in functions(s)}
    assert set(allowed("positional")) <= known
