"""Patches go on all or nothing, stack in one order whatever came first, and come off exactly."""

import importlib
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed.patching import Patch, Patcher, PatchError

SHOP = """
    __version__ = "3.2.1"
    LIMIT = 10

    def price(item, count=1):
        return f"price({item},{count})"

    class Base:
        def greet(self, name):
            return f"Base.greet({name})"

    class Counter(Base):
        rate = 5

        def __init__(self, name):
            self.name = name

        def add(self, n):
            return f"add({n})"

        @staticmethod
        def double(n):
            return 2 * n

        @classmethod
        def make(cls, name):
            return cls(name)

        @property
        def label(self):
            return "label " + self.name

        class Inner:
            def run(self, x):
                return x

    class Sibling(Base):
        pass
"""


@pytest.fixture
def shop(write):
    write(shop=SHOP)
    return importlib.import_module("shop")


def tagging(tag):
    """A wrap factory that shows where it stands in the chain."""

    def factory(original):
        def wrapper(*args, **kwargs):
            return f"{tag}<{original(*args, **kwargs)}>"

        return wrapper

    return factory


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


@pytest.mark.parametrize("base_first", [True, False])
def test_an_inherited_method_is_wrapped_around_the_patched_base(shop, patcher, base_first):
    def child(original):
        return tagging("child")(original.__call__)  # which no search for copies can look into

    calls = [
        ("base", [Patch.wrap("shop:Base.greet", tagging("base"))]),
        ("child", [Patch.wrap("shop:Counter.greet", child)]),
    ]
    for owner, patches in calls if base_first else calls[::-1]:
        patcher.apply(owner, patches)
    assert shop.Counter("c").greet("x") == "child<base<Base.greet(x)>>"
    assert shop.Sibling().greet("x") == "base<Base.greet(x)>"
    patcher.revert("base")
    assert shop.Counter("c").greet("x") == "child<Base.greet(x)>"
    assert shop.Sibling().greet("x") == "Base.greet(x)"


def test_add_creates_and_revert_removes(shop, patcher):
    patches = [Patch.add("shop:discount", 3), Patch.add("shop:Counter.tax", staticmethod(abs))]
    patcher.apply("extra", patches)
    assert (shop.discount, shop.Counter.tax(-2)) == (3, 2)
    patcher.revert("extra")
    assert not hasattr(shop, "discount") and not hasattr(shop.Counter, "tax")


def test_revert_of_one_owner_keeps_the_others(shop, patcher):
    def new(item, count=1):
        return "new"

    patcher.apply("r", [Patch.replace("shop:price", new)])
    patcher.apply("a", [Patch.wrap("shop:price", tagging("a"))])
    patcher.apply("b", [Patch.wrap("shop:price", tagging("b"))])
    assert shop.price("x") == "b<a<new>>"
    patcher.revert("a")
    assert shop.price("x") == "b<new>"
    patcher.revert("r")
    assert shop.price("x") == "b<price(x,1)>"
    assert [record.owner for record in patcher.report()] == ["b"]


def test_one_object_under_two_names_is_one_target(write, patcher):
    write(mall__stand="def sell(x):\n    return x", mall__office="from mall.stand import sell")
    office, stand = (importlib.import_module(f"mall.{name}") for name in ("office", "stand"))
    patcher.apply("a", [Patch.wrap("mall.office:sell", tagging("a"))])
    patcher.apply("b", [Patch.wrap("mall.stand:sell", tagging("b"))])
    assert office.sell(1) == stand.sell(1) == "b<a<1>>"
    patcher.apply("first", [Patch.replace("mall.office:sell", lambda x: "new")])
    with pytest.raises(PatchError, match="^second: cannot replace mall.stand:sell.* first repl"):
        patcher.apply("second", [Patch.replace("mall.stand:sell", lambda x: "other")])
    assert office.sell(1) == stand.sell(1) == "b<a<new>>"


@pytest.mark.parametrize("class_first", [True, False])
def test_members_of_a_wrapped_class_are_those_of_the_original(shop, patcher, class_first):
    def subclass(original):
        class Sub(original):
            def __init__(self, name):
                super().__init__(name + "!")

        return Sub

    calls = [
        ("class", [Patch.wrap("shop:Counter", subclass)]),
        ("member", [Patch.wrap("shop:Counter.add", tagging("m"))]),
    ]
    for owner, patches in calls if class_first else calls[::-1]:
        patcher.apply(owner, patches)
    assert shop.Counter("c").name == "c!"
    assert shop.Counter("c").add(1) == "m<add(1)>"


def test_what_somebody_else_put_there_since_is_not_taken_away(shop, patcher):
    patcher.apply("a", [Patch.wrap("shop:price", tagging("a"))])
    shop.price = theirs = lambda item, count=1: "theirs"
    with pytest.raises(PatchError, match="^b: cannot wrap shop:price .*changed it since"):
        patcher.apply("b", [Patch.wrap("shop:price", tagging("b"))])
    patcher.revert()
    assert shop.price is theirs


OWNERS = [("zoe", 0), ("abe", 1), ("mia", 0), ("rep", 2)]
MODULES = ["depot.late", "depot.early", "depot.stock"]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.permutations([*OWNERS, *MODULES]),
    reverted=st.lists(st.sampled_from(["zoe", "abe", "mia", "rep"]), unique=True, max_size=2),
)
def test_the_chain_depends_on_neither_apply_order_nor_import_order(write, steps, reverted):
    write(
        depot__stock="""
        def count(x):
            return f"count({x})"
        """,
        depot__early="""
        from functools import partial
        from depot.stock import count
        table = {"count": count}
        call = partial(count)
        """,
        depot__late="""
        from depot.stock import count as renamed
        def ask(x, how=renamed):
            return how(x)
        pair = (renamed, 1)
        """,
    )
    patcher = Patcher()
    try:
        for step in steps:
            if isinstance(step, str):
                importlib.import_module(step)
            elif step[0] == "rep":
                patcher.apply("rep", [Patch.replace("depot.stock:count", _count)], level=step[1])
            else:
                patch = Patch.wrap("depot.stock:count", tagging(step[0]))
                patcher.apply(step[0], [patch], level=step[1])
        for owner in reverted:
            patcher.revert(owner)
        expected = "count(7)" if "rep" in reverted else "new(7)"
        for owner in ("mia", "zoe", "abe"):
            expected = expected if owner in reverted else f"{owner}<{expected}>"
        assert _answers() == {expected}
        patcher.revert()
        assert _answers() == {"count(7)"}
    finally:
        patcher.revert()
        for name in ["depot", *MODULES]:
            sys.modules.pop(name, None)


def _count(x):
    return f"new({x})"


def _answers():
    early, late, stock = (sys.modules[f"depot.{name}"] for name in ("early", "late", "stock"))
    callables = [stock.count, early.count, early.table["count"], early.call]
    callables += [late.renamed, late.ask, late.pair[0]]
    return {each(7) for each in callables}
