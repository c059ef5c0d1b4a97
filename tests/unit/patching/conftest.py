"""Throw-away packages to patch, and a patcher that must leave no trace."""

import importlib
import sys
import textwrap

import pytest

from mindspeed.patching import Patcher
from mindspeed.patching.imports import ImportHook
from tests.unit.patching.samples import CRYPT, SHOP


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write modules (pkg__mod="source") to a directory on sys.path; forget them afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    tops = set()

    def write(**files):
        for name, source in files.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            if path.stem == "init":
                path = path.with_name("__init__.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(tmp_path).parents:
                if parent.parts:
                    (tmp_path / parent / "__init__.py").touch()
            path.write_text(textwrap.dedent(source))
            tops.add(path.relative_to(tmp_path).parts[0].removesuffix(".py"))
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]


@pytest.fixture
def shop(write):
    write(shop=SHOP)
    return importlib.import_module("shop")


@pytest.fixture
def source(write):
    write(crypt__source=CRYPT, crypt__other="")
    return importlib.import_module("crypt.source")


@pytest.fixture(autouse=True)
def no_other_hooks(monkeypatch):
    """Take the adaptor's hook away, where another test has imported the adaptor."""
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not _is_hook(each)])


@pytest.fixture(autouse=True)
def few_modules(monkeypatch):
    """Take away other tests and the suites they import: a search for copies looks through all."""
    for name in list(sys.modules):
        is_other_test = name.startswith("tests.") and not name.startswith("tests.unit.patching")
        if is_other_test or name.startswith(("mindspeed_llm", "mindspeed_mm")):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def patcher():
    patcher = Patcher()
    yield patcher
    patcher.revert()
    assert patcher.report() == []
    assert not any(map(_is_hook, sys.meta_path))


def _is_hook(finder):
    return isinstance(finder, ImportHook)
