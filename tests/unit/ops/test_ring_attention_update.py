import pytest
import torch

from mindspeed.ops.fusion_attention import fusion_attention
from mindspeed.ops.ring_attention_update import ring_attention_update, triton_impl
from tests.unit.ops.pairwise import pairwise

B, S, N, D = 2, 5, 3, 12
BOTH = pytest.mark.parametrize(
    "function", [ring_attention_update, triton_impl.ring_attention_update]
)


@pairwise(
    BOTH,
    pytest.mark.parametrize("layout", ["SBH", "TND"]),
    pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_two_halves_of_the_keys_make_the_whole(function, layout, dtype):
    torch.manual_seed(0)
    shape = (S, B, N * D) if layout == "SBH" else (S, N, D)
    q, k, v = (torch.randn(shape, dtype=dtype) * 2 for _ in range(3))
    options = {"scale": 0.3}

    def attend(rows):
        lengths = {"actual_seq_qlen": [S], "actual_seq_kvlen": [len(k[rows])]}
        more = lengths if layout == "TND" else {}
        return fusion_attention(q, k[rows], v[rows], N, layout, **options, **more)[:3]

    whole, first, second = attend(slice(None)), attend(slice(0, 2)), attend(slice(2, None))
    out, largest, total = function(*first, *second, layout=layout)
    assert out.dtype == dtype and out.shape == whole[0].shape
    error = (out - whole[0]).double().norm() / whole[0].double().norm()
    assert error < (2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6)
    torch.testing.assert_close(largest, whole[1])
    torch.testing.assert_close(total, whole[2])


@BOTH
def test_rows_without_keys_count_for_nothing(function):
    torch.manual_seed(0)
    least = torch.full((B, N, S, 8), torch.finfo(torch.float32).min)
    none = (torch.zeros(S, B, N * D), least, torch.zeros(B, N, S, 8))
    some = (torch.randn(S, B, N * D), torch.randn(B, N, S, 8)[..., :1].expand(-1, -1, -1, 8))
    some = (*some, torch.rand(B, N, S, 8)[..., :1].expand(-1, -1, -1, 8) + 1)
    for pair in ((none, some), (some, none)):
        for got, want in zip(function(*pair[0], *pair[1]), some):
            torch.testing.assert_close(got, want)
    out, _, total = function(*none, *none)
    assert not out.any() and not total.any()


@BOTH
def test_a_float32_sum_of_bfloat16_parts(function):
    prev, cur = torch.randn(S, B, N * D), torch.randn(S, B, N * D).bfloat16()
    statistics = [torch.zeros(B, N, S, 8), torch.ones(B, N, S, 8)]
    out = function(prev, *statistics, cur, *statistics)[0]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, (prev + cur.float()) / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "BSH"}, "layout=BSH: use SBH or TND"),
        ({"layout": "TND"}, r"layout=TND: outputs of shape \(5, 2, 36\) do not match"),
        ({"cur": torch.ones(S, B, 3)}, "the same shapes"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    statistics = [torch.ones(B, N, S, 8)] * 2
    out = torch.ones(S, B, N * D)
    with pytest.raises(ValueError, match=message):
        ring_attention_update(
            out,
            *statistics,
            change.get("cur", out),
            *statistics,
            layout=change.get("layout", "SBH"),
        )
    with pytest.raises(TypeError, match="does not take input_layout"):
        ring_attention_update(out, *statistics, out, *statistics, input_layout="SBH")
