"""Which of several ways is taken, and that nothing changes where nothing can be tried."""

import pytest
import torch

from mindspeed.ops import product as room
from mindspeed.ops.product import add_product, fastest, product, tuning


class Clock:
    """Times that are known: seconds of each turn of each run."""

    def __init__(self, *times):
        self.left = [list(of_run) for of_run in times]
        self.asked = []

    def __call__(self, run, count):
        self.asked.append((run, count))
        return 1e-3 if len(self.asked) <= 2 else self.left[run].pop(0)


def test_the_least_median_wins():
    # The second was once the fastest of all, by chance.
    clock = Clock([3e-3, 3e-3, 3e-3], [1e-3, 4e-3, 4e-3], [2e-3, 9e-3, 2e-3])
    assert fastest([0, 1, 2], clock) == 2


def test_turns_are_long_and_the_first_is_not_counted():
    clock = Clock([1e-3] * 3, [2e-3] * 3)
    assert fastest([0, 1], clock) == 0
    (_, first), (warmed, warm_up), *turns = clock.asked
    assert warmed == 0 and warm_up == pytest.approx(room.WARM_UP / 1e-3, abs=1)
    assert [run for run, _ in turns] == [0, 1] * room.TURNS
    assert {count for _, count in turns} == {round(room.TURN / 1e-3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_multiplies_as_ever(dtype):
    a, b = torch.randn(3, 5, 7, dtype=dtype), torch.randn(7, 4, dtype=dtype)
    with tuning():
        assert torch.equal(product(a, b), a @ b)
        out = torch.empty(5, 4, dtype=dtype)
        assert product(a[0], b, out) is out
        assert torch.equal(out, a[0] @ b)


def test_without_a_winner_the_callers_own_way_adds():
    total, a, b = torch.ones(5, 4), torch.randn(5, 7), torch.randn(7, 4)
    with tuning():
        add_product(total, a, b, lambda a, b, total: total.add_(a @ b))
    assert torch.equal(total, 1 + a @ b)


def test_only_large_plain_products_of_half_precision_are_worth_it():
    with torch.device("meta"):
        a, b = torch.empty(8192, 1536).bfloat16(), torch.empty(1536, 8960).bfloat16()
        served = room._is_served
        assert served(a, b, None) and served(a, torch.empty(8960, 1536).bfloat16().t(), None)
        assert served(a, b, torch.empty(8192, 8960))
        assert not served(a[:64], b, None)
        assert not served(a.float(), b.float(), None)
        assert not served(a, b.half(), None)
        assert not served(a, b, torch.empty(8960, 8192).t())
        assert not served(a[:, ::2], b[:768], None)
