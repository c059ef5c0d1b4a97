"""Rules on source files that linters do not check."""

import ast

from tests.conventions.source import allowed, assert_none, functions, sources

POSITIONAL, DEPTH = 6, 4


def is_kernel(function):
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def test_modules_have_docstrings():
    assert_none(
        f"{source.name} has no docstring"
        for source in sources()
        if source.tree.body and not ast.get_docstring(source.tree)
    )


def test_folders_are_shallow():
    assert_none(s.name for s in sources() if len(s.path.parts) - 2 > DEPTH)


def many_positional():
    exceptions = allowed("positional")
    for source in sources():
        for function in functions(source):
            if is_kernel(function):
                continue  # Triton has no keyword-only parameters
            named = [*function.args.posonlyargs, *function.args.args]
            count = len([a for a in named if a.arg not in ("self", "cls", "ctx")])
            where = f"{source.name}:{function.name}"
            if count > POSITIONAL and where not in exceptions:
                yield f"{where} takes {count} positional parameters, at most {POSITIONAL}"


def test_functions_take_few_positional_parameters():
    assert_none(many_positional())


def test_positional_exceptions_are_still_needed():
    known = {f"{s.name}:{f.name}" for s in sources() for f in functions(s)}
    assert set(allowed("positional")) <= known


def prints():
    for source in sources():
        if source.folder.endswith("/cli"):
            continue
        for node in ast.walk(source.tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id == "print":
                yield f"{source.name}:{node.lineno} prints: use a logger"


def test_only_commands_print():
    assert_none(prints())


def other_files_among_commands():
    for source in sources():
        if source.folder.endswith("/cli") and source.path.stem not in ("__init__", "main"):
            if {"add_parser", "run"} - {node.name for node in functions(source)}:
                yield f"{source.name} is no command: it needs add_parser and run, or another folder"


def test_a_file_among_the_commands_is_a_command():
    assert_none(other_files_among_commands())


def silenced():
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
                yield f"{source.name}:{node.lineno} imports *"
            if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name):
                silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                if silent and node.type.id == "Exception":
                    yield f"{source.name}:{node.lineno} silences every exception"


def test_no_star_imports_and_no_silenced_errors():
    assert_none(silenced())


def logic_in_init():
    plain = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
    for source in sources():
        if source.path.name != "__init__.py":
            continue
        for node in source.tree.body:
            # Names that load at first use are declared for type checkers, served by __getattr__.
            is_lazy = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            is_lazy |= isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            # Nothing else of the package can be imported by an older Python.
            is_python = isinstance(node, ast.If) and "sys.version_info" in ast.unparse(node.test)
            if not (isinstance(node, plain) or is_lazy or is_python):
                yield f"{source.name}:{node.lineno} has logic"


def test_init_files_only_re_export():
    assert_none(logic_in_init())
