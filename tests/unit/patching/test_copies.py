"""Every holder of the original is rebound, counted and restored."""

import importlib
import json
from types import FunctionType

import pytest

from mindspeed.patching import Patch, Patcher, PatchError

SOURCE = """
    def hash(data, salt=0):
        return "old"

    class Codec:
        def __init__(self, key=0):
            self.key = key

        def encode(self, data):
            return "old"

        @classmethod
        def default(cls):
            return "old"

        @staticmethod
        def check(data):
            return "old"

        def name(self):
            return super().__repr__() and "old"
"""


@pytest.fixture
def source(write):
    write(crypt__source=SOURCE, crypt__other="")
    return importlib.import_module("crypt.source")


def _new(data, salt=0):
    return "new"


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
    value = _new if verb == "replace" else lambda original: _new
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
    patcher.apply("x", [Patch.replace("crypt.source:hash", _new)])
    assert script.h is script.table["h"] is _new
    assert patcher.report()[0].copies == 2


def test_installed_packages_are_searched_only_when_named(source, write, tmp_path, monkeypatch):
    write(**{"site-packages__vendor": "from crypt.source import hash"})
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    vendor = importlib.import_module("vendor")
    for packages, expected in (((), source.hash), (("vendor",), _new)):
        patcher = Patcher(packages)
        patcher.apply("x", [Patch.replace("crypt.source:hash", _new)])
        assert vendor.hash is expected
        patcher.revert()
    monkeypatch.delitem(importlib.sys.modules, "vendor")


def test_bound_and_unbound_copies_of_methods(source, write, patcher):
    write(
        crypt__holder="""
        from crypt.source import Codec
        instance = Codec()
        encode, default, check = instance.encode, Codec.default, Codec.check
        class Other:
            encode = Codec.encode
        """
    )
    holder = importlib.import_module("crypt.holder")

    def asked():
        answers = [holder.encode(1), holder.default(), holder.check(1), holder.Other().encode(1)]
        return answers + [holder.Codec().encode(1), holder.Codec.default(), holder.Codec.check(1)]

    def always_new(original):
        return lambda *args, **kwargs: "new"

    names = ("encode", "default", "check")
    patcher.apply("x", [Patch.wrap(f"crypt.source:Codec.{name}", always_new) for name in names])
    assert asked() == ["new"] * 7
    assert [record.copies for record in patcher.report()] == [2, 1, 1]
    patcher.revert()
    assert asked() == ["old"] * 7


def test_a_class_is_exchanged_in_its_copies_but_not_under_super(source, write, patcher):
    write(
        crypt__holder="""
        from typing import Generic, TypeVar
        from crypt.source import Codec
        T = TypeVar("T")
        registry = {"codec": Codec, Codec: 1}
        class Child(Codec, Generic[T]):
            kind = Codec
            typed: Codec
        def use(codec: Codec):
            return codec
        typed: Codec
        """
    )
    holder = importlib.import_module("crypt.holder")
    old = source.Codec

    class Better(old):
        def encode(self, data):
            return "new"

    patcher.apply("x", [Patch.replace("crypt.source:Codec", Better)])
    assert holder.registry == {"codec": Better, Better: 1} and holder.Child.kind is Better
    assert holder.Codec().encode(1) == "new"
    assert holder.Codec().name() == "old"  # super() inside the original class still works
    assert holder.Child.__mro__[1] is holder.Child.__orig_bases__[0] is old
    mentions = (holder.use, holder.Child, holder)
    assert all(list(each.__annotations__.values()) == [old] for each in mentions)
    assert patcher.report()[0].copies == 4
    patcher.revert()
    assert holder.registry == {"codec": old, old: 1}


def test_the_module_of_a_replacement_keeps_its_reference_to_the_original(source, write, patcher):
    write(
        faster="""
        from crypt.source import Codec as Base, hash as original
        def hash(data, salt=0):
            return "new " + original(data, salt)
        class Codec(Base):
            def encode(self, data):
                return "new " + Base.encode(self, data)
        """
    )
    patcher.apply(
        "x", [Patch.replace(f"crypt.source:{n}", f"faster:{n}") for n in ("hash", "Codec")]
    )
    assert source.hash(1) == source.Codec().encode(1) == "new old"


def test_a_factory_may_stash_the_original_anywhere(source, write, patcher):
    write(
        stash="""
        kept = []
        def wrap(original):
            kept.append(original)
            return lambda data, salt=0: "new " + kept[-1](data, salt)
        """
    )
    patcher.apply("a", [Patch.wrap("crypt.source:hash", "stash:wrap")])
    assert source.hash(1) == "new old"
    patcher.apply(
        "b", [Patch.wrap("crypt.source:hash", lambda f: lambda *a, **k: f(*a, **k) + "!")]
    )
    assert source.hash(1) == "new old!"


def test_copies_in_modules_that_a_factory_imports(source, write, patcher):
    write(crypt__helper="from crypt.source import hash")

    def factory(original):
        helper = importlib.import_module("crypt.helper")
        return lambda data, salt=0: f"new {helper.__name__} {original(data, salt)}"

    patcher.apply("x", [Patch.wrap("crypt.source:hash", factory)])
    helper = importlib.import_module("crypt.helper")
    assert helper.hash is source.hash and helper.hash(1) == "new crypt.helper old"


def test_copies_made_later_come_back_too(source, write, patcher):
    write(crypt__late="from crypt.source import hash, hash as h\nt = (hash,)")
    original = source.hash
    patcher.apply("x", [Patch.replace("crypt.source:hash", _new)])
    late = importlib.import_module("crypt.late")
    assert late.hash is late.h is late.t[0] is _new
    patcher.revert()
    assert late.hash is late.h is late.t[0] is original


def test_who_held_the_replacement_before_keeps_it(source, write, patcher):
    write(
        vendor="def hash(data, salt=0):\n    return 'vendor'",
        crypt__own="from vendor import hash\ntable = [hash]",
    )
    own = importlib.import_module("crypt.own")
    vendor = importlib.import_module("vendor")
    patcher.apply("x", [Patch.replace("crypt.source:hash", "vendor:hash")])
    assert source.hash is vendor.hash
    patcher.revert()
    assert own.hash is own.table[0] is vendor.hash is not source.hash


SHARED = """
    import json
    from json import dumps
    from math import sqrt
    from socket import AF_INET
    from decimal import ROUND_UP, Decimal
    from crypt.kinds import RED
    FLAG, NAME, ZERO, PAIR = None, "x", Decimal(0), (1, 2)
    LIMIT = crypt_limit
"""


def test_who_takes_the_replacement_from_its_own_package_keeps_it(source, write, patcher):
    write(vendor__fast="def hash(data, salt=0):\n    return 'vendor'")
    write(vendor__late="from vendor.fast import hash")
    patcher.apply("x", [Patch.replace("crypt.source:hash", "vendor.fast:hash")])
    late, fast = (importlib.import_module(f"vendor.{name}") for name in ("late", "fast"))
    patcher.revert()
    assert late.hash is fast.hash is not source.hash


def test_a_key_that_cannot_be_one(source, write, patcher):
    write(crypt__holder="from crypt.source import hash\ntable = {1: 2, hash: 3, 4: 5}")
    holder = importlib.import_module("crypt.holder")
    before = dict(holder.table)

    class Unhashable:
        __hash__ = None

        def __call__(self, data, salt=0):
            return "new"

    with pytest.raises(PatchError, match="unhashable"):
        patcher.apply("x", [Patch.replace("crypt.source:hash", Unhashable())])
    assert list(holder.table.items()) == list(before.items())
    assert holder.hash is source.hash is list(before)[1]


def test_large_collections_are_data(source, write, patcher):
    write(crypt__holder="import crypt.source as s\ndata = [0] * 20_000 + [s.hash]")
    holder = importlib.import_module("crypt.holder")
    patcher.apply("x", [Patch.replace("crypt.source:hash", _new)])
    assert holder.data[-1](1) == "old" and patcher.report()[0].copies == 0


def test_shared_and_foreign_objects_are_changed_in_one_place_only(write, patcher):
    shared = SHARED.replace("crypt_limit", "RED")
    write(
        crypt__kinds="from enum import Enum\nclass Kind(Enum):\n    RED = 1\nRED = Kind.RED",
        crypt__a=shared,
        crypt__b=shared,
    )
    a, b = (importlib.import_module(f"crypt.{name}") for name in "ab")
    b.ZERO = a.ZERO  # a foreign object without a name, like a dtype
    before = dict(vars(b))
    names = ("json", "sqrt", "dumps", "AF_INET", "FLAG", "NAME", "ZERO", "PAIR", "RED", "LIMIT")
    values = {name: object() for name in names} | {"dumps": _dumps, "sqrt": lambda x, /: 1}
    patcher.apply("x", [Patch.replace(f"crypt.a:{name}", values[name]) for name in names])
    assert {name: vars(a)[name] for name in names} == values
    assert dict(vars(b)) == before
    assert {record.copies for record in patcher.report()} == {0}


_dumps = FunctionType(json.dumps.__code__, {}, "dumps", None)
_dumps.__kwdefaults__ = json.dumps.__kwdefaults__


def test_what_a_foreign_decorator_made_is_followed(write, patcher):
    write(
        crypt__a="""
        import contextlib, functools
        @contextlib.contextmanager
        def managed(x):
            yield x
        @functools.lru_cache
        def cached(x):
            return x
        bare = functools.partial(int, base=2)
        table = {"k": 1}
        """,
        crypt__b="from crypt.a import bare, cached, managed, table",
    )
    b = importlib.import_module("crypt.b")
    values = {"managed": lambda x: 1, "cached": lambda x: 2, "table": {"k": 2}}
    values["bare"] = type("Bare", (), {"__call__": lambda self, /, *a, base=2: 3})()
    importlib.import_module("crypt.a")
    patcher.apply("x", [Patch.replace(f"crypt.a:{name}", new) for name, new in values.items()])
    assert {name: vars(b)[name] for name in values} == values


def test_two_targets_in_one_tuple(source, write, patcher):
    write(crypt__holder="import crypt.source as s\npair = (s.hash, s.Codec.check)\nseen = [pair]")
    holder = importlib.import_module("crypt.holder")
    pair = holder.pair
    patcher.apply("a", [Patch.replace("crypt.source:hash", _new)])
    patcher.apply("b", [Patch.replace("crypt.source:Codec.check", lambda data: "new")])
    assert [f(1) for f in holder.pair] == [f(1) for f in holder.seen[0]] == ["new", "new"]
    patcher.revert("a")
    assert [f(1) for f in holder.pair] == ["old", "new"]
    patcher.revert("b")
    assert holder.pair is pair and holder.seen[0] is pair


def test_what_the_user_put_there_since_is_left_alone(source, write, patcher):
    write(crypt__holder="from crypt.source import hash\ntable = {'h': hash}\nkeys = {hash: 1}")
    holder = importlib.import_module("crypt.holder")
    patcher.apply("x", [Patch.replace("crypt.source:hash", _new)])
    holder.hash, holder.table["h"] = "mine", "mine too"
    holder.keys.clear()
    patcher.revert()
    assert (holder.hash, holder.table, holder.keys) == ("mine", {"h": "mine too"}, {})


def test_searching_does_not_disturb_objects(source, write, patcher):
    write(
        crypt__holder="""
        from crypt.source import hash
        class Touchy:
            def __getattribute__(self, name):
                raise RuntimeError("touched " + name)
            def __eq__(self, other):
                raise RuntimeError("compared")
            __hash__ = None
        items = [Touchy(), {"t": Touchy()}, (Touchy(),)]
        loop = []
        loop.append(loop)
        """
    )
    importlib.import_module("crypt.holder")
    patcher.apply("x", [Patch.replace("crypt.source:hash", _new)])
    assert patcher.report()[0].copies == 1


def test_copies_in_megatron_follow_and_come_back(patcher):
    import megatron.core.models.gpt  # noqa: F401
    from megatron.core.transformer import mlp

    names = ("mlp:MLP", "attention:SelfAttention", "transformer_layer:TransformerLayer")
    names += ("transformer_block:TransformerBlock", "identity_op:IdentityOp")
    patches = [Patch.wrap(f"megatron.core.transformer.{name}", _subclass) for name in names]
    original = mlp.MLP
    patcher.apply("x", patches)
    assert mlp.MLP is not original
    assert sum(record.copies for record in patcher.report()) > len(patches)
    patcher.revert()
    assert mlp.MLP is original


def _subclass(original):
    return type("Mine", (original,), {})
