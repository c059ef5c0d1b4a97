"""Whatever holds the original is found, rebound and restored."""

import importlib
import sys

import pytest

from mindspeed.patching import Patch, Patcher
from tests.unit.patching.samples import new_hash

# Each holder, and how to ask it.
HOLDERS = {
    "from import": ("from crypt.source import hash", lambda m: m.hash(1)),
    "renamed": ("from crypt.source import hash as h", lambda m: m.h(1)),
    "dict entry": (
        "from crypt.source import hash\nt = {'a': [hash]}\ndel hash",
        lambda m: m.t["a"][0](1),
    ),
    "dict key": (
        "from crypt.source import hash\nt = {1: 2, hash: 3}\ndel hash",
        lambda m: [*m.t][1](1),
    ),
    "set": ("from crypt.source import hash\nt = {hash}\ndel hash", lambda m: [*m.t][0](1)),
    "list": ("from crypt.source import hash\nt = [0, hash]\ndel hash", lambda m: m.t[1](1)),
    "nested tuple": ("import crypt.source as s\nt = (1, (s.hash, 2))", lambda m: m.t[1][0](1)),
    "named tuple": (
        "import crypt.source as s\nfrom typing import NamedTuple\n"
        "class T(NamedTuple):\n    f: object\n    g: object\nt = T(s.hash, 2)",
        lambda m: m.t.f(1),
    ),
    "partial func": (
        "import crypt.source as s\nfrom functools import partial\nt = partial(s.hash, salt=2)",
        lambda m: m.t(1),
    ),
    "partial args": (
        "import crypt.source as s\nfrom functools import partial\nt = partial(map, s.hash)",
        lambda m: next(m.t([1])),
    ),
    "partial keywords": (
        "import crypt.source as s\nfrom functools import partial\nt = partial(sorted, key=s.hash)",
        lambda m: m.t.keywords["key"](1),
    ),
    "default": ("import crypt.source as s\ndef t(x, f=s.hash):\n    return f(x)", lambda m: m.t(1)),
    "keyword default": (
        "import crypt.source as s\ndef t(x, *, f=s.hash):\n    return f(x)",
        lambda m: m.t(1),
    ),
    "method default": (
        "import crypt.source as s\nclass T:\n    def t(self, f=s.hash):\n        return f(1)",
        lambda m: m.T().t(),
    ),
    "closure": (
        "import crypt.source as s\ndef make(f):\n    return lambda x: f(x)\nt = make(s.hash)",
        lambda m: m.t(1),
    ),
    "function attribute": (
        "import crypt.source as s\ndef t():\n    pass\nt.hash = s.hash",
        lambda m: m.t.hash(1),
    ),
    "class attribute": (
        "import crypt.source as s\nclass T:\n    f = s.hash",
        lambda m: m.T.f(1),
    ),
    "staticmethod": (
        "import crypt.source as s\nclass T:\n    f = staticmethod(s.hash)",
        lambda m: m.T().f(1),
    ),
    "property": (
        "import crypt.source as s\nclass T:\n    f = property(s.hash)",
        lambda m: m.T().f,
    ),
    "dataclass default": (
        "import crypt.source as s\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass T:\n    f: object = s.hash",
        lambda m: m.T().f(1) + m.T.__dataclass_fields__["f"].default(1) + m.T.f(1),
    ),
    "dataclass factory": (
        "import crypt.source as s\nfrom dataclasses import dataclass, field\n"
        "@dataclass\nclass T:\n    f: object = field(default_factory=lambda f=s.hash: f(1))",
        lambda m: m.T().f,
    ),
    "spec in a container": (
        "import crypt.source as s\nfrom dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass Spec:\n    module: object\nt = {'layer': [Spec(s.hash)]}",
        lambda m: m.t["layer"][0].module(1),
    ),
    "object with slots": (
        "import crypt.source as s\nclass T:\n    __slots__ = ('f', 'unset')\nt = T()\nt.f = s.hash",
        lambda m: m.t.f(1),
    ),
    "simple namespace": (
        "import crypt.source as s\nfrom types import SimpleNamespace\n"
        "t = SimpleNamespace(f=s.hash)",
        lambda m: m.t.f(1),
    ),
    "defaultdict": (
        "import crypt.source as s\nfrom collections import defaultdict\n"
        "t = defaultdict(list, f=s.hash)",
        lambda m: m.t["f"](1),
    ),
}


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("verb", ["replace", "wrap"])
def test_a_copy_follows_and_comes_back(source, write, patcher, kind, verb):
    code, ask = HOLDERS[kind]
    write(crypt__holder=code)
    holder = importlib.import_module("crypt.holder")
    before, old = dict(vars(holder)), ask(holder)
    value = new_hash if verb == "replace" else lambda original: new_hash
    patcher.apply("x", [getattr(Patch, verb)("crypt.source:hash", value)])
    assert ask(holder) == old.replace("old", "new")
    (record,) = patcher.report()
    assert record.copies == (3 if kind == "dataclass default" else 1)
    patcher.revert()
    assert ask(holder) == old
    assert all(vars(holder)[name] is value for name, value in before.items())


def test_the_same_kinds_in_a_user_script_outside_the_package(source, write, patcher):
    write(script="from crypt.source import hash as h\ntable = {'h': h}")
    script = importlib.import_module("script")
    patcher.apply("x", [Patch.replace("crypt.source:hash", new_hash)])
    assert script.h is script.table["h"] is new_hash
    assert patcher.report()[0].copies == 2


def test_installed_packages_are_searched_only_when_named(source, write, tmp_path, monkeypatch):
    write(**{"site-packages__vendor": "from crypt.source import hash"})
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    vendor = importlib.import_module("vendor")
    for packages, expected in (((), source.hash), (("vendor",), new_hash)):
        patcher = Patcher(packages)
        patcher.apply("x", [Patch.replace("crypt.source:hash", new_hash)])
        assert vendor.hash is expected
        patcher.revert()
    del sys.modules["vendor"]
