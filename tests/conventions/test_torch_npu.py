"""Every torch_npu call binds to the signature that torch-npu's wheel declares.

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


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of a torch_npu operator with the place it is made."""
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and _operator(node.func) is not None:
                yield f"{source.name}:{node.lineno}", node


def _operator(function: ast.expr) -> str | None:
    """Return the name of torch_npu.npu_x or torch.ops.npu.npu_x, None for anything else."""
    text = ast.unparse(function)
    match = re.fullmatch(r"(?:torch_npu|torch\.ops\.npu)\.(_?npu_\w+)", text)
    return match[1] if match else None


def declared() -> dict[str, inspect.Signature]:
    """Read the declarations as Python signatures."""
    lines = DECLARATIONS.read_text().splitlines()
    return dict(_signature(line) for line in lines if not line.startswith("#"))


def _signature(line: str) -> tuple[str, inspect.Signature]:
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


def _read(wheel: str) -> dict[str, str]:
    """Collect the signatures that the argument parsers of a wheel's libraries hold as text."""
    found: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
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
