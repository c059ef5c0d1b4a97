"""Every copy of the original is rebound, counted and restored."""

import importlib

from mindspeed.patching import Patch
from tests.unit.patching.samples import new_hash, tagging


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
    patcher.apply("x", [Patch.replace("crypt.source:hash", new_hash)])
    late = importlib.import_module("crypt.late")
    assert late.hash is late.h is late.t[0] is new_hash
    patcher.revert()
    assert late.hash is late.h is late.t[0] is original


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
    patcher.apply("a", [Patch.replace("crypt.source:hash", new_hash)])
    patcher.apply("b", [Patch.replace("crypt.source:Codec.check", lambda data: "new")])
    assert [f(1) for f in holder.pair] == [f(1) for f in holder.seen[0]] == ["new", "new"]
    for _ in range(5):
        patcher.revert("a")
        assert [f(1) for f in holder.pair] == ["old", "new"]
        patcher.apply("a", [Patch.replace("crypt.source:hash", new_hash)])
        assert [f(1) for f in holder.pair] == ["new", "new"]
    patcher.revert("a")
    patcher.revert("b")
    assert holder.pair is pair and holder.seen[0] is pair


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


def test_a_late_copy_in_the_package_of_a_wrapper_comes_back(source, write, patcher):
    write(
        vendor__fast="def wrap(original):\n    return lambda data, salt=0: 'wrapped'",
        vendor__late="from crypt.source import hash",
    )
    patcher.apply("x", [Patch.wrap("crypt.source:hash", "vendor.fast:wrap")])
    late = importlib.import_module("vendor.late")
    assert late.hash(1) == "wrapped"
    patcher.revert()
    assert late.hash is source.hash and late.hash(1) == "old"


def test_a_copy_that_its_module_takes_again(source, write, patcher):
    write(crypt__holder="from crypt.source import hash")
    holder = importlib.import_module("crypt.holder")
    patcher.apply("x", [Patch.replace("crypt.source:hash", new_hash)])
    holder.hash = "mine"
    patcher.apply("y", [Patch.wrap("crypt.source:hash", tagging("y"))])
    assert holder.hash == "mine"
    holder.hash = source.hash
    patcher.revert("y")
    assert holder.hash is source.hash is new_hash
    patcher.revert()
    assert holder.hash is source.hash and holder.hash(1) == "old"
