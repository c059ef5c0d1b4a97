"""Every torch_npu call binds to the signature that torch-npu's wheel declares.

Operators are declared by text in its libraries, the others, such as profiler.profile, in Python.

`python -m tests.conventions.test_torch_npu WHEEL...` rewrites torch_npu.txt: what every wheel
given declares of the functions that are called or were in it before.
"""

import ast
import importlib
import inspect
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conventions.source import sources

DECLARATIONS = Path(__file__).with_name("torch_npu.txt")
_LIBRARIES = re.compile(r"torch_npu/(lib/)?[^/]+\.so")
_DECLARED = re.compile(rb"_?npu_\w+\([ -~]*\) -> [ -~]+")
_PYTHON = re.compile(r"torch_npu/(\w+)/\w+\.py")


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of a torch_npu operator or function with the place it is made."""
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and _operator(node.func) is not None:
                yield f"{source.name}:{node.lineno}", node


def _operator(function: ast.expr) -> str | None:
    """Return x of torch_npu.x or torch.ops.npu.x, None for anything else."""
    match = re.fullmatch(r"(?:torch_npu|torch\.ops\.npu)\.([\w.]+)", ast.unparse(function))
    return match[1] if match else None


def declared() -> dict[str, inspect.Signature]:
    """Read the declarations as Python signatures."""
    lines = DECLARATIONS.read_text().splitlines()
    return dict(_signature(line) for line in lines if not line.startswith("#"))


def _signature(line: str) -> tuple[str, inspect.Signature]:
    if " -> " not in line:
        return _python_signature(line)
    schema = torch._C.parse_schema(line)
    parameters = [
        inspect.Parameter(
            argument.name,
            kind=(
                inspect.Parameter.KEYWORD_ONLY
                if argument.kwarg_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD
            ),
            default=None if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in schema.arguments
    ]
    return schema.name, inspect.Signature(parameters)


def _python_signature(line: str) -> tuple[str, inspect.Signature]:
    name, _, arguments = line.partition("(")
    (function,) = ast.parse(f"def f({arguments}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given, optional = function.args.args, len(function.args.defaults)
    parameters = [
        inspect.Parameter(
            each.arg,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if number >= len(given) - optional else inspect.Parameter.empty,
        )
        for number, each in enumerate(given)
    ]
    for each, default in zip(function.args.kwonlyargs, function.args.kw_defaults):
        value = inspect.Parameter.empty if default is None else None
        parameters.append(
            inspect.Parameter(each.arg, inspect.Parameter.KEYWORD_ONLY, default=value)
        )
    return name, inspect.Signature(parameters)


@pytest.mark.parametrize(("place", "call"), [pytest.param(*c, id=c[0]) for c in calls()])
def test_call_binds_to_the_declaration(place: str, call: ast.Call) -> None:
    name = _operator(call.func)
    known = declared()
    assert name in known, f"{place} calls {name}, which torch_npu.txt does not declare: {__doc__}"
    assert not any(isinstance(argument, ast.Starred) for argument in call.args), place
    known[name].bind(*call.args, **dict.fromkeys(_keywords(place, call)))


def _keywords(place: str, call: ast.Call) -> Iterator[str]:
    """Yield the keywords; `**options` are those of the Options that contract.py declares."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
            continue
        assert ast.unparse(keyword.value) == "options", f"{place}: only **options can be checked"
        package = Path(place).parent.as_posix().replace("/", ".")
        yield from importlib.import_module(f"{package}.contract").Options.__annotations__


def test_the_check_finds_a_wrong_call() -> None:
    signature = declared()["npu_rms_norm"]
    signature.bind(1, 2, epsilon=1e-6)
    for keywords in ({}, {"eps": 1e-6}):
        with pytest.raises(TypeError):
            signature.bind(1, **keywords)


def test_the_check_finds_a_wrong_call_of_python() -> None:
    signature = declared()["profiler.profile"]
    signature.bind(record_shapes=True)
    for arguments, keywords in (((1,), {}), ((), {"shapes": True})):
        with pytest.raises(TypeError):
            signature.bind(*arguments, **keywords)


def _read_python(archive: zipfile.ZipFile) -> dict[str, str]:
    """Collect the signatures of functions and classes in the wheel's packages."""
    found: dict[str, str] = {}
    for match in filter(None, map(_PYTHON.fullmatch, archive.namelist())):
        for node in ast.parse(archive.read(match[0])).body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            for each in inner:
                is_own = each is node or getattr(each, "name", "") == "__init__"
                if is_own and isinstance(each, ast.FunctionDef):
                    name = f"{match[1]}.{getattr(node, 'name', '')}"
                    found[name] = f"{name}({_plain(each.args, each is not node)})"
    return found


def _plain(arguments: ast.arguments, is_method: bool) -> str:
    """Return arguments without their types."""
    arguments.args = arguments.args[1:] if is_method else arguments.args
    for each in (*arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    return ast.unparse(arguments)


def _read(wheel: str) -> dict[str, str]:
    """Collect the signatures of a wheel: its libraries hold those of operators as text."""
    with zipfile.ZipFile(wheel) as archive:
        found = _read_python(archive)
        for name in filter(_LIBRARIES.fullmatch, archive.namelist()):
            for match in _DECLARED.findall(archive.read(name)):
                text = match.decode()
                found.setdefault(text.partition("(")[0], text)
    return found


if __name__ == "__main__":
    wheels = {Path(path).name.split("-")[1]: _read(path) for path in sys.argv[1:]}
    names = sorted({_operator(call.func) or "" for _, call in calls()} | declared().keys())
    rows = []
    for name in names:
        texts = {declarations.get(name) for declarations in wheels.values()}
        assert len(texts) == 1 and None not in texts, f"{name}: {texts}"
        rows.append(texts.pop())
    header = f"# What torch-npu {' and '.join(wheels)} declare, read by test_torch_npu.py."
    DECLARATIONS.write_text("\n".join([header, *map(str, rows)]) + "\n")
