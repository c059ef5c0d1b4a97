"""What only looks like a copy, or is no longer one, keeps what it holds."""

import importlib
import json
import sys
from types import FunctionType, ModuleType

import pytest

from mindspeed.patching import Patch, PatchError
from tests.unit.patching.samples import new_hash, tagging


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
    patcher.apply("x", [Patch.replace("crypt.source:hash", new_hash)])
    assert holder.data[-1](1) == "old" and patcher.report()[0].copies == 0


def test_what_only_claims_to_be_a_module_is_passed_over(source, patcher, monkeypatch):
    class Library:
        """What cffi puts into sys.modules: an object of its own type with a module's __class__."""

        __class__ = ModuleType

    monkeypatch.setitem(sys.modules, "crypt._bindings.lib", Library())
    patcher.apply("x", [Patch.replace("crypt.source:hash", new_hash)])
    assert source.hash is new_hash


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


def test_a_compiled_function_of_no_module_is_changed_in_one_place_only(write, patcher):
    """As those of torch._C are: they do not say where they are from."""
    write(crypt__a="join = '-'.join", crypt__b="from crypt.a import join")
    a, b = (importlib.import_module(f"crypt.{name}") for name in "ab")
    assert b.join.__module__ is None
    patcher.apply("x", [Patch.replace("crypt.a:join", lambda iterable, /: "new")])
    assert (a.join("ab"), b.join("ab")) == ("new", "a-b")


def test_a_name_for_an_inherited_method_stays_when_its_patch_goes(shop, patcher):
    patcher.apply("x", [Patch.wrap("shop:Counter.greet", lambda original: original)])
    patcher.apply("y", [Patch.wrap("shop:Counter.greet", tagging("y"))])
    shop.greet = greet = shop.Counter.greet
    patcher.revert("y")
    assert shop.greet is greet
    patcher.revert()
    assert shop.greet is greet and "greet" not in vars(shop.Counter)


_dumps = FunctionType(json.dumps.__code__, {}, "dumps", None)
_dumps.__kwdefaults__ = json.dumps.__kwdefaults__


def test_what_the_user_put_there_since_is_left_alone(source, write, patcher):
    write(crypt__holder="from crypt.source import hash\ntable = {'h': hash}\nkeys = {hash: 1}")
    holder = importlib.import_module("crypt.holder")
    patcher.apply("x", [Patch.replace("crypt.source:hash", new_hash)])
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
    patcher.apply("x", [Patch.replace("crypt.source:hash", new_hash)])
    assert patcher.report()[0].copies == 1
