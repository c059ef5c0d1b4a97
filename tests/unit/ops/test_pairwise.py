"""A covering array has every pair of values, and far fewer cases than the full product."""

import itertools

import pytest

from tests.unit.ops.pairwise import covering_array, pairwise


@pytest.mark.parametrize("sizes", [[2, 2], [2, 5, 4, 2], [3, 3, 3, 3, 3], [1, 4, 1]], ids=str)
def test_every_pair_is_covered(sizes):
    cases = covering_array(sizes)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        pairs = {(case[a], case[b]) for case in cases}
        assert pairs == set(itertools.product(range(sizes[a]), range(sizes[b])))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert len(cases) <= 2 * largest * second


def test_marks_are_combined_with_their_names_values_and_ids():
    shape = pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 4)], ids=["small", "large"])
    flag = pytest.mark.parametrize("flag", [True, False])
    kind = pytest.mark.parametrize("kind", [int, float], ids=lambda kind: kind.__name__)
    names, cases = pairwise(shape, flag, kind).args
    assert names == ["rows", "columns", "flag", "kind"]
    assert cases[0].values == (1, 2, True, int) and cases[0].id == "small-True-int"
    assert {case.values[:3] for case in cases} == {
        (*size, flag) for size in [(1, 2), (3, 4)] for flag in (True, False)
    }
