"""Parametrise a test over several axes without running their full product."""

import itertools
from typing import Any

import pytest


def pairwise(**axes: Any) -> pytest.MarkDecorator:
    """Run a test so that every two values of any two axes occur together at least once.

    Defects depend on one argument or on two of them far more often than on three at a time, and a
    covering array of n values on each axis has about n * n cases however many axes there are.
    """
    names = list(axes)
    values = [list(axes[name]) for name in names]
    cases = [[values[i][j] for i, j in enumerate(case)] for case in _covering_array(values)]
    return pytest.mark.parametrize(names, cases)


def _covering_array(values: list[list[Any]]) -> list[tuple[int, ...]]:
    """Return cases, as indices of values, that cover every pair; the same ones at every call."""
    columns = range(len(values))
    pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(columns, 2)
        for i in range(len(values[a]))
        for j in range(len(values[b]))
    }
    cases = []
    while pairs:
        a, i, b, j = min(pairs)
        case = {a: i, b: j}
        for column in columns:
            if column not in case:
                case[column] = max(
                    range(len(values[column])),
                    key=lambda index, column=column: (_count(pairs, case, column, index), -index),
                )
        cases.append(tuple(case[column] for column in columns))
        covered = itertools.combinations(enumerate(cases[-1]), 2)
        pairs -= {(*first, *second) for first, second in covered}
    return cases


def _count(pairs: set[tuple[int, ...]], case: dict[int, int], column: int, index: int) -> int:
    """Count the uncovered pairs that a value of one column makes with the columns chosen so far."""
    chosen = (sorted([(column, index), other]) for other in case.items())
    return sum((*first, *second) in pairs for first, second in chosen)
