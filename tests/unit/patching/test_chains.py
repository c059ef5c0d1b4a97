"""Patches of one target stack in one order, whatever came first."""

import importlib
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed.patching import Patch, Patcher, PatchError
from tests.unit.patching.samples import tagging


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


def test_what_somebody_else_put_there_since_is_not_taken_away(shop, patcher):
    patcher.apply("a", [Patch.wrap("shop:price", tagging("a"))])
    shop.price = theirs = lambda item, count=1: "theirs"
    with pytest.raises(PatchError, match="^b: cannot wrap shop:price .*changed it since"):
        patcher.apply("b", [Patch.wrap("shop:price", tagging("b"))])
    patcher.revert()
    assert shop.price is theirs


OWNERS = [("zoe", 0), ("abe", 1), ("mia", 0), ("rep", 2)]
MODULES = ["depot.late", "depot.early", "depot.stock"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
