"""What the tests of whole commands on a GPU see of a step."""

import torch

from tests.gpu.profiled import large_operators, recorder


def test_large_operators_of_a_step():
    one, other = torch.ones(4, 5, requires_grad=True), torch.ones(3, 5)
    profiler = recorder()
    with profiler:
        torch.cat([one, other])
        torch._foreach_add_([other, other], 1.0)
        first, last = one.split([1, 3])
        (first.exp().sum() + last.sum()).backward()  # backward joins the gradients
        torch.neg(other)
    found = large_operators(profiler, 20)
    assert found["aten::cat"] == 2
    assert found["aten::_foreach_add_"] == 1 and "aten::add_" not in found
    assert not {"aten::exp", "aten::neg"} & found.keys()
    found = large_operators(profiler, 5)
    assert found["aten::exp"] == 1 and found["aten::neg"] == 1
