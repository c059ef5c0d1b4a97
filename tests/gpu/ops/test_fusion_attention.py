"""fusion_attention and its merge on the GPU, against the reference in float64."""

import pytest
import torch

from mindspeed.ops.fusion_attention import fusion_attention, reference
from mindspeed.ops.ring_attention_update import reference as merge_reference
from mindspeed.ops.ring_attention_update import ring_attention_update

pytestmark = pytest.mark.gpu
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def run(function, inputs, *args, **options):
    given = [x.detach().requires_grad_() for x in inputs]
    out, largest, total, *_ = function(*given, *args, **options)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, device="cuda", dtype=torch.float32).to(out.dtype))
    logarithm = largest[..., 0].double() + total[..., 0].double().log()
    return [out.detach(), logarithm, *(x.grad for x in given)]


def check(inputs, *args, **options):
    got = run(fusion_attention, inputs, *args, **options)
    want = run(reference.fusion_attention, [x.double() for x in inputs], *args, **options)
    for ours, true in zip(got, want, strict=True):
        assert (ours.double() - true).norm() / true.norm() < 1e-2


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("length", [96, 768])
@pytest.mark.parametrize("mode", [0, 2, 3, 4])
def test_modes_and_layouts(layout, length, mode):
    torch.manual_seed(0)
    sizes = {"B": 2, "S": length, "N": 8, "D": 64, "H": 8 * 64}
    shapes = [[sizes[c] for c in layout]] * 3
    if "N" in layout:
        shapes[1:] = [[2 if c == "N" else sizes[c] for c in layout]] * 2
    inputs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    options = {"atten_mask": COMPRESSED.cuda(), "sparse_mode": mode} if mode else {}
    check(inputs, 8, layout, scale=0.125, pre_tokens=50, next_tokens=3, **options)


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_packed(mode):
    torch.manual_seed(0)
    inputs = [torch.randn(300, n, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2)]
    options = {"atten_mask": COMPRESSED.cuda(), "sparse_mode": mode} if mode else {}
    bounds = {"actual_seq_qlen": [50, 51, 300], "actual_seq_kvlen": [50, 51, 300]}
    check(inputs, 8, "TND", scale=0.125, **bounds, **options)


def test_what_torch_cannot_say_goes_to_the_reference():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    slopes = torch.rand(4, device="cuda")
    check(inputs, 4, "BNSD", scale=0.125, pse=slopes, pse_type=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(dtype):
    torch.manual_seed(0)
    outs = [torch.randn(512, 2, 8 * 128, device="cuda") for _ in range(2)]
    rows = [torch.randn(2, 8, 512, 1, device="cuda").expand(-1, -1, -1, 8) for _ in range(2)]
    sums = [torch.rand(2, 8, 512, 1, device="cuda").expand(-1, -1, -1, 8) + 1 for _ in range(2)]
    given = [outs[0].to(dtype), rows[0], sums[0], outs[1].bfloat16(), rows[1], sums[1]]
    got = ring_attention_update(*given)
    want = merge_reference.ring_attention_update(*(x.double() for x in given))
    for ours, true in zip(got, want):
        error = (ours.double() - true).norm() / true.norm()
        assert error < (1e-6 if ours.dtype == torch.float32 else 4e-3)
    assert all(torch.equal(a, b) for a, b in zip(got, ring_attention_update(*given)))
