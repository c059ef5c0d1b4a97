"""When it is certain that an object has no copy, and when it is not."""

import importlib

import pytest

from mindspeed.patching.places import is_alone, place_of

SOURCE = """
    import abc
    import dataclasses

    def function(x, y=1):
        return function

    class Plain:
        def method(self):
            return 1

    class Parent:
        def __init__(self):
            super().__init__()

    class Child(Parent, abc.ABC):
        __slots__ = ("a", "b")

        @property
        def name(self):
            return __class__

        @staticmethod
        def static():
            return 1

        def run(self):
            return super().run()

    class Grandchild(Child):
        def run(self):
            return super().run()

    @dataclasses.dataclass
    class Data:
        x: int = 0
        y: list = dataclasses.field(default_factory=list)
"""

NAMES = ["function", "Plain", "Parent", "Child", "Grandchild", "Data"]


@pytest.fixture
def module(write):
    write(lonely=SOURCE)
    return importlib.import_module("lonely")


@pytest.mark.parametrize("name", NAMES)
def test_alone(module, name):
    assert is_alone(place_of(module, name))


def test_a_method_is_alone_until_it_is_copied(module):
    assert is_alone(place_of(module.Plain, "method"))
    module.copy = module.Plain.method
    assert not is_alone(place_of(module.Plain, "method"))


@pytest.mark.parametrize("name", NAMES)
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
def test_not_alone(module, name, hold):
    module.holder = hold(vars(module)[name])
    assert not is_alone(place_of(module, name))


def test_other_objects_are_never_certain(module):
    module.table = {}
    assert not is_alone(place_of(module, "table"))
    assert not is_alone(place_of(module, "absent"))
