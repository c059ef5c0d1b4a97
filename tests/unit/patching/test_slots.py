"""When it is certain that a function has no copy, so that none is searched for."""

import importlib

import pytest

from mindspeed.patching.slots import has_no_copy, slot_of

SOURCE = """
    def function(x, y=1):
        return function

    class Plain:
        def method(self):
            return 1

        @staticmethod
        def static():
            return 1
"""


@pytest.fixture
def module(write):
    write(lonely=SOURCE)
    return importlib.import_module("lonely")


def test_a_function_has_no_copy_until_it_is_copied(module):
    assert has_no_copy(slot_of(module, "function"))
    module.copy = module.function
    assert not has_no_copy(slot_of(module, "function"))


def test_a_method_has_no_copy_until_it_is_copied(module):
    assert has_no_copy(slot_of(module.Plain, "method"))
    module.copy = module.Plain.method
    assert not has_no_copy(slot_of(module.Plain, "method"))


@pytest.mark.parametrize(
    "hold",
    [
        lambda value: value,
        lambda value: [value],
        lambda value: {"x": value},
        lambda value: {value},
        lambda value: (1, value),
        lambda value: lambda default=value: 1,
        lambda value: lambda: value,
        lambda value: type("Holder", (), {"held": value}),
    ],
)
def test_any_holder_is_a_copy(module, hold):
    module.holder = hold(module.function)
    assert not has_no_copy(slot_of(module, "function"))


def test_other_objects_are_never_certain(module):
    module.table = {}
    assert not has_no_copy(slot_of(module, "table"))
    assert not has_no_copy(slot_of(module, "Plain"))
    assert not has_no_copy(slot_of(module.Plain, "static"))
    assert not has_no_copy(slot_of(module, "absent"))
