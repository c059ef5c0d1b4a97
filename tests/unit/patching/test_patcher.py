"""Patches go on and come off exactly."""

import sys

import pytest

from mindspeed.patching import Patch, PatchError
from tests.unit.patching.samples import tagging


def test_replace_and_revert_a_function(shop, patcher):
    original = shop.price

    def new(item, count=1):
        return "new"

    patcher.apply("cheap", [Patch.replace("shop:price", new, why="too slow")], level=2)
    assert shop.price is new
    (record,) = patcher.report()
    assert (record.owner, record.level, record.kind) == ("cheap", 2, "replace")
    assert (record.target, record.state, record.why) == ("shop:price", "applied", "too slow")
    patcher.revert()
    assert shop.price is original


def test_a_factory_is_called_for_changes_of_its_own_target_only(shop, patcher):
    calls = []

    def factory(original):
        calls.append(original)
        return lambda item, count=1: "new"

    patcher.apply("x", [Patch.wrap("shop:price", factory)])
    new = shop.price
    patcher.apply("y", [Patch.wrap("shop:Counter.add", tagging("y"))])
    patcher.revert("y")
    assert shop.price is new and len(calls) == 1


def test_the_original_of_each_target(shop, patcher):
    price, add = shop.price, shop.Counter.add
    targets = ("shop:price", "shop:Counter.add")
    patcher.apply("x", [Patch.wrap(target, tagging("x")) for target in targets])
    assert [*map(patcher.original, targets), patcher.original("shop:Base")] == [price, add, None]


def test_an_addition_keeps_its_own_kind(shop, patcher):
    patcher.apply("x", [Patch.add("shop:Counter.triple", staticmethod(lambda n: 3 * n))])
    assert shop.Counter("c").triple(2) == 6
    patcher.revert()
    assert not hasattr(shop.Counter, "triple")


def test_what_a_module_makes_when_it_is_asked(write, patcher):
    write(lazy="def __getattr__(name):\n    return {'total': sum}[name]")
    import lazy

    patcher.apply("x", [Patch.wrap("lazy:total", lambda original: lambda *a, **k: 5)])
    assert lazy.total([1]) == 5
    patcher.revert()
    assert lazy.total is sum and "total" not in vars(lazy)


def test_values_are_imported_only_when_applied(shop, write, patcher):
    write(
        fast="""
        class Kit:
            @staticmethod
            def price(item, count=1):
                return "fast"

        def wrap(original):
            return lambda item, count=1: "wrapped " + original(item, count)
        """
    )
    patches = [Patch.replace("shop:price", "fast:Kit.price"), Patch.wrap("shop:price", "fast:wrap")]
    assert "fast" not in sys.modules
    patcher.apply("fast", patches)
    assert shop.price("x") == "wrapped fast"


@pytest.mark.parametrize(
    ("target", "call", "expected"),
    [
        ("shop:Counter.add", lambda shop: shop.Counter("c").add(3), "w<add(3)>"),
        ("shop:Counter.double", lambda shop: shop.Counter.double(3), "w<6>"),
        ("shop:Counter.double", lambda shop: shop.Counter("c").double(n=3), "w<6>"),
        ("shop:Counter.Inner.run", lambda shop: shop.Counter.Inner().run(3), "w<3>"),
        ("shop:Counter.greet", lambda shop: shop.Counter("c").greet("x"), "w<Base.greet(x)>"),
    ],
)
def test_methods_of_every_kind_can_be_wrapped(shop, patcher, target, call, expected):
    before = call(shop)
    patcher.apply("w", [Patch.wrap(target, tagging("w"))])
    assert call(shop) == expected
    patcher.revert()
    assert call(shop) == before


def test_a_classmethod_stays_bound_to_the_class(shop, patcher):
    class Special(shop.Counter):
        pass

    def factory(original):
        return lambda cls, name: original(cls, name.upper())

    patcher.apply("upper", [Patch.wrap("shop:Counter.make", factory)])
    assert type(vars(shop.Counter)["make"]) is classmethod
    made = Special.make("x")
    assert type(made) is Special and made.name == "X"


def test_properties_and_constants_can_be_replaced(shop, patcher):
    label = property(lambda self: "new " + self.name)
    patcher.apply(
        "p",
        [
            Patch.replace("shop:Counter.label", label),
            Patch.replace("shop:Counter.rate", 7),
            Patch.replace("shop:LIMIT", 20),
        ],
    )
    assert (shop.Counter("c").label, shop.Counter.rate, shop.LIMIT) == ("new c", 7, 20)
    patcher.revert()
    assert (shop.Counter("c").label, shop.Counter.rate, shop.LIMIT) == ("label c", 5, 10)


def test_inherited_attributes_are_deleted_on_revert_and_siblings_are_left_alone(shop, patcher):
    namespaces = [dict(vars(cls)) for cls in (shop.Base, shop.Counter, shop.Sibling)]
    patcher.apply("g", [Patch.wrap("shop:Counter.greet", tagging("g"))])
    assert shop.Sibling().greet("x") == shop.Base().greet("x") == "Base.greet(x)"
    patcher.revert()
    assert [dict(vars(cls)) for cls in (shop.Base, shop.Counter, shop.Sibling)] == namespaces


def test_add_creates_and_revert_removes(shop, patcher):
    patches = [Patch.add("shop:discount", 3), Patch.add("shop:Counter.tax", staticmethod(abs))]
    patcher.apply("extra", patches)
    assert (shop.discount, shop.Counter.tax(-2)) == (3, 2)
    patcher.revert("extra")
    assert not hasattr(shop, "discount") and not hasattr(shop.Counter, "tax")


def test_several_owners_at_once(shop, patcher):
    wraps = [("b", 2), ("a", 1), ("c", 1)]
    patcher.apply_all((name, [Patch.wrap("shop:price", tagging(name))], n) for name, n in wraps)
    assert shop.price("x").startswith("b<c<a<")
    patcher.revert_all({"b", "a"})
    assert shop.price("x").startswith("c<") and [r.owner for r in patcher.report()] == ["c"]


def test_several_owners_are_all_or_none(shop, patcher):
    good = ("good", [Patch.wrap("shop:price", tagging("good"))], 0)
    before = shop.price
    with pytest.raises(PatchError, match="bad: .*pric"):
        patcher.apply_all([good, ("bad", [Patch.wrap("shop:pric", tagging("bad"))], 0)])
    assert shop.price is before and not patcher.report()
    patcher.revert_all(())
