"""Parametrise a test over several axes without running their full product."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest


class Axis(NamedTuple):
    """The names, values and ids of one `pytest.mark.parametrize`."""

    names: list[str]
    values: list[tuple[Any, ...]]
    ids: list[str]


def pairwise(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Combine parametrize marks so that every two values of any two marks occur together.

    Defects depend on one argument or on two of them far more often than on three at a time, and a
    covering array of n values on each axis has about n * n cases however many axes there are.
    """
    axes = [_axis(mark) for mark in marks]
    names = [name for axis in axes for name in axis.names]
    cases = []
    for case in covering_array([len(axis.values) for axis in axes]):
        chosen = list(zip(axes, case, strict=True))
        values = (value for axis, index in chosen for value in axis.values[index])
        case_id = "-".join(axis.ids[index] for axis, index in chosen)
        cases.append(pytest.param(*values, id=case_id))
    return pytest.mark.parametrize(names, cases)


def _axis(mark: pytest.MarkDecorator) -> Axis:
    names, values = mark.args
    ids = mark.kwargs.get("ids")
    is_single = isinstance(names, str) and "," not in names
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)
    if ids is None:
        ids = [_id(names[0], index, value) for index, value in enumerate(values)]
    elif callable(ids):
        ids = [str(ids(value)) for value in values]
    rows = [(value,) if is_single else tuple(value) for value in values]
    return Axis(names, rows, [str(one) for one in ids])


def _id(name: str, index: int, value: Any) -> str:
    return str(value) if isinstance(value, str | int | float | None) else f"{name}{index}"


def covering_array(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return cases, an index for each axis, that cover every pair; the same ones at every call."""
    uncovered = {
        pair
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for pair in itertools.product([a], range(sizes[a]), [b], range(sizes[b]))
    }
    cases = []
    while uncovered:
        a, i, b, j = min(uncovered)
        case = {a: i, b: j}
        for axis, size in enumerate(sizes):
            if axis not in case:
                counts = [
                    len(uncovered.intersection(_pairs({**case, axis: index})))
                    for index in range(size)
                ]
                case[axis] = counts.index(max(counts))
        uncovered.difference_update(_pairs(case))
        cases.append(tuple(case[axis] for axis in range(len(sizes))))
    return cases


def _pairs(case: dict[int, int]) -> Iterator[tuple[int, int, int, int]]:
    for (a, i), (b, j) in itertools.combinations(sorted(case.items()), 2):
        yield a, i, b, j
