"""What counts as being called like the original."""

import functools
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.patching.signatures import mismatch


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def area(width, height=1, *, unit="m"):
    return width * height


def other(width, depth=1, *, unit="m"):
    return width * depth


class Function:
    """Looks like torch.autograd.Function."""

    @classmethod
    def apply(cls, *args):
        return cls.forward(None, *args)


class Square(Function):
    @staticmethod
    def forward(ctx, x, power=2):
        return x**power


class SquareToo(Function):
    @staticmethod
    def forward(context, ctx, x, power=2):
        return x


class SquareWithSetup(Function):
    @staticmethod
    def forward(x, power=2):
        return x**power


class Cube(Function):
    @staticmethod
    def forward(ctx, x, exponent=3):
        return x**exponent


class Amp(Function):
    forward = staticmethod(decorated(Square.forward))


class Plain:
    pass


class Sized:
    def __init__(self, size, name=None):
        self.size = size


class SizedChild(Sized):
    pass


class Forwarding(Sized):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Created:
    def __new__(cls, size, name=None):
        return super().__new__(cls)


@pytest.mark.parametrize(
    ("original", "new"),
    [
        (area, lambda width, height=2, *, unit="cm": 0),
        (area, functools.partial(lambda x, width, height=2, *, unit="cm": 0, 1)),
        (decorated(area), area),  # a decorator on the original declares what callers rely on
        (decorated(area), lambda width, height=2, *, unit="cm": 0),
        (Square, SquareWithSetup),
        (Amp, Square),
        (Plain, type("Empty", (), {})),
        (Sized, SizedChild),
        (Sized, Created),
        (len, lambda obj, /: 0),
        (type("Error", (Exception,), {}), type("Other", (Exception,), {})),
        (type("Error", (Exception,), {}), Sized),  # Python cannot tell what Error takes
        (5, area),
        (None, "anything"),
    ],
)
def test_same(original, new):
    assert mismatch(original, new, forwards=False) is None


@pytest.mark.parametrize(
    ("original", "new"),
    [
        (area, other),
        (area, decorated(area)),
        (area, decorated(other)),
        (area, lambda *args, **kwargs: 0),
        (decorated(area), lambda *args, **kwargs: 0),
        (area, min),
        (Square, Cube),
        (Square, SquareToo),
        (Square, Amp),
        (Sized, Plain),
        (Sized, Forwarding),
        (Sized, area),
    ],
)
def test_different_for_a_replacement(original, new):
    assert mismatch(original, new, forwards=False)


def test_a_wrap_may_forward_everything_but_not_hide_a_difference():
    assert mismatch(area, lambda *args, **kwargs: 0, forwards=True) is None
    assert mismatch(area, decorated(other), forwards=True) is None
    assert mismatch(area, lambda width, *args, **kwargs: 0, forwards=True) is None
    assert mismatch(Sized, Forwarding, forwards=True) is None

    @functools.wraps(area)
    def hidden(width, depth=1, *, unit="m"):
        return 0

    hidden.__signature__ = inspect.signature(area)
    assert "depth" in mismatch(area, hidden, forwards=True)
    assert "other" in mismatch(area, lambda other, *args, **kwargs: 0, forwards=True)
    assert mismatch(area, lambda *args: 0, forwards=True)
    assert mismatch(area, lambda **kwargs: 0, forwards=True)


names = st.lists(st.sampled_from("abcde"), unique=True, max_size=4)


@given(names, names, st.integers(0, 4), st.integers(0, 4), st.booleans())
def test_equal_exactly_when_names_and_defaults_are(left, right, split, other_split, keyword_only):
    def make(parameters, split):
        star = ["*"] if keyword_only and parameters else []
        text = [*star, *parameters[:split], *(f"{name}=0" for name in parameters[split:])]
        return eval(f"lambda {', '.join(text)}: 0")

    same = left == right and min(split, len(left)) == min(other_split, len(right))
    found = mismatch(make(left, split), make(right, other_split), forwards=False)
    assert (found is None) == same
