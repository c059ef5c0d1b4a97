import itertools
import math

import pytest
import torch

from mindspeed.ops.fusion_attention import fusion_attention
from mindspeed.ops.fusion_attention.reference import Options, document_mode

B, S, N, D = 2, 6, 4, 8
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def draw(num_q=S, num_k=S, groups=N, dtype=torch.float64, size_v=D):
    torch.manual_seed(0)
    shapes = (B, N, num_q, D), (B, groups, num_k, D), (B, groups, num_k, size_v)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def naive(q, k, v, scale, sees=None, bias=None):
    """One query at a time, by the formula."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    sums = torch.zeros(q.shape[:3], dtype=q.dtype)
    for b, n, i in itertools.product(*map(range, q.shape[:3])):
        group = n // (q.shape[1] // k.shape[1])
        keys = [j for j in range(k.shape[2]) if sees is None or sees(b, n, i, j)]
        if not keys:
            continue
        scores = torch.stack([q[b, n, i] @ k[b, group, j] * scale for j in keys])
        if bias is not None:
            scores = scores + torch.stack([bias(b, n, i, j) for j in keys])
        sums[b, n, i] = scores.exp().sum()
        out[b, n, i] = scores.softmax(0) @ v[b, group, keys]
    return out, sums


def compare(got, want, inputs):
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    for ours, true in zip(*(torch.autograd.grad(x, inputs, grad) for x in (got, want))):
        torch.testing.assert_close(ours, true)


@pytest.mark.parametrize(("num_q", "num_k"), [(0, 5), (5, 0), (0, 0)])
def test_without_queries_or_keys(num_q, num_k):
    inputs = draw(num_q, num_k, groups=2)
    out, largest, total, *_ = fusion_attention(*inputs, N, "BNSD", scale=0.3)
    compare(out, 0 * inputs[0] + 0 * sum(x.sum() for x in inputs[1:]), inputs)
    assert largest.shape == total.shape == (B, N, num_q, 8) and not total.any()


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_layouts_and_grouped_queries(layout, groups):
    inputs = draw(groups=groups, num_k=5)
    order = {"BNSD": (0, 1, 2, 3), "SBH": (2, 0, 1, 3)}.get(layout, (0, 2, 1, 3))
    given = [x.permute(order) for x in inputs]
    given = [x.flatten(2) for x in given] if layout in ("BSH", "SBH") else given
    out, largest, total, reserved, seed, offset, numbers = fusion_attention(
        *given, N, layout, scale=0.3
    )
    want, sums = naive(*inputs, 0.3)
    expected = want.permute(order)
    compare(out, expected.flatten(2) if layout in ("BSH", "SBH") else expected, inputs)
    assert largest.shape == total.shape == (B, N, S, 8) and largest.dtype == torch.float32
    assert torch.equal(largest, largest[..., :1].expand_as(largest))
    torch.testing.assert_close((largest.exp() * total)[..., 0].double(), sums, rtol=1e-5, atol=0)
    assert (reserved.numel(), seed, offset, numbers) == (0, 0, 0, 0)


MODES = {
    0: lambda i, j, q, k: -3 <= j - i <= 1,
    1: lambda i, j, q, k: (i + j) % 3 != 0,
    2: lambda i, j, q, k: j <= i,
    3: lambda i, j, q, k: j <= i + k - q,
    4: lambda i, j, q, k: -3 <= j - (i + k - q) <= 1,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_q", "num_k"), [(6, 6), (4, 7), (7, 4)])
def test_sparse_modes(mode, num_q, num_k):
    inputs = draw(num_q, num_k, groups=2)
    given = COMPRESSED
    if mode < 2:
        given = torch.tensor([[(i + j) % 3 == 0 for j in range(num_k)] for i in range(num_q)])

    def sees(b, n, i, j):
        is_seen = MODES[mode](i, j, num_q, num_k)
        return is_seen and (mode > 0 or (i + j) % 3 != 0)

    out = fusion_attention(
        *inputs,
        N,
        "BNSD",
        scale=0.3,
        atten_mask=given.to(torch.uint8),
        sparse_mode=mode,
        pre_tokens=3,
        next_tokens=1,
    )[0]
    compare(out, naive(*inputs, 0.3, sees)[0], inputs)


def test_a_negative_band():
    inputs = draw()
    out = fusion_attention(
        *inputs, N, "BNSD", atten_mask=COMPRESSED, sparse_mode=4, pre_tokens=6, next_tokens=-2
    )[0]
    compare(out, naive(*inputs, 1.0, lambda b, n, i, j: -6 <= j - i <= -2)[0], inputs)
    assert not out[:, :, :2].any()  # they see no key


@pytest.mark.parametrize("mode", [5, 6])
def test_prefix(mode):
    inputs, prefix = draw(4, 6), [3, 5]
    out = fusion_attention(
        *inputs, N, "BNSD", atten_mask=COMPRESSED, sparse_mode=mode, prefix=prefix
    )[0]
    sees = lambda b, n, i, j: j <= i + 2 or j < prefix[b]  # noqa: E731
    compare(out, naive(*inputs, 1.0, sees)[0], inputs)


@pytest.mark.parametrize("shape", [(S, S), (1, 1, S, S), (B, 1, S, S), (B, N, S, S)])
def test_shapes_of_masks(shape):
    inputs = draw()
    torch.manual_seed(1)
    mask = torch.rand(shape) < 0.3
    full = mask.expand(B, N, S, S)
    out = fusion_attention(*inputs, N, "BNSD", atten_mask=mask, sparse_mode=1)[0]
    compare(out, naive(*inputs, 1.0, lambda *at: not full[at])[0], inputs)


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_position_bias(kind):
    inputs = draw()
    if kind < 2:
        pse = torch.randn(B, N, S, S, dtype=torch.float64, requires_grad=True)
        factor = 0.3 if kind else 1.0
        bias = lambda *at: pse[at] * factor  # noqa: E731
        inputs = [*inputs, pse]
    else:
        pse = torch.rand(N)
        power = 0.5 if kind == 3 else 1.0
        bias = lambda b, n, i, j: -pse[n].double() * abs(i + 2 - j - 1) ** power  # noqa: E731
    out = fusion_attention(
        *inputs[:3], N, "BNSD", scale=0.3, pse=pse, pse_type=kind, q_start_idx=[2], kv_start_idx=[1]
    )[0]
    compare(out, naive(*inputs[:3], 0.3, bias=bias)[0], inputs)


@pytest.mark.parametrize("mode", [0, 2, 3, 4, 7, 8])
def test_packed_documents(mode):
    torch.manual_seed(0)
    bounds_q, bounds_k = [2, 2, 5, 9], [3, 4, 7, 11]
    q = torch.randn(10, N, D, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(12, 2, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"atten_mask": COMPRESSED, "sparse_mode": mode} if mode else {}
    out, largest, *_ = fusion_attention(
        q,
        k,
        v,
        N,
        "TND",
        actual_seq_qlen=[*bounds_q, 0, 0],
        actual_seq_kvlen=[*bounds_k, 0, 0],
        pre_tokens=4,
        next_tokens=-1,
        **options,
    )
    rule = {0: None, 2: MODES[2], 3: MODES[3]}
    rule[4] = lambda i, j, q, k: -4 <= j - (i + k - q) <= -1
    pieces = []
    starts = zip([0, *bounds_q], bounds_q, [0, *bounds_k], bounds_k)
    for number, (q0, q1, k0, k1) in enumerate(starts):
        of_one = {7: 4 if number == 3 else 3, 8: 4 if number == 0 else 2}.get(mode, mode)
        see = rule[of_one]
        each = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
        sees = see and (lambda b, n, i, j, f=see, m=q1 - q0, c=k1 - k0: f(i, j, m, c))
        pieces.append(naive(*each, 1.0, sees)[0][0].transpose(0, 1))
    want = torch.cat([*pieces, torch.zeros(1, N, D, dtype=torch.float64)])
    compare(out, want, (q, k, v))
    assert largest.shape == (10, N, 8)


def test_packed_documents_have_their_own_prefix():
    torch.manual_seed(0)
    bounds, prefix = [4, 7, 12], [1, 3, 2]
    q, k, v = (torch.randn(12, N, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    options = {"actual_seq_qlen": bounds, "actual_seq_kvlen": bounds, "prefix": prefix}
    out = fusion_attention(q, k, v, N, "TND", atten_mask=COMPRESSED, sparse_mode=6, **options)[0]
    pieces = []
    for start, end, size in zip([0, *bounds], bounds, prefix):
        each = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        sees = lambda b, n, i, j, size=size: j <= i or j < size  # noqa: E731
        pieces.append(naive(*each, 1.0, sees)[0][0].transpose(0, 1))
    compare(out, torch.cat(pieces), (q, k, v))


def test_dropout_keeps_the_mean():
    torch.manual_seed(0)
    q, k = torch.zeros(2, 8, 64, 4), torch.zeros(2, 8, 64, 4)
    v = torch.ones(2, 8, 64, 4)
    out, *_, numbers = fusion_attention(q, k, v, 8, "BNSD", keep_prob=0.75)
    assert abs(out.mean().item() - 1) < 0.02
    # Of 64 equal weights about three quarters are kept: the deviation of that count.
    assert abs(out[..., 0].std().item() - math.sqrt(0.25 / 0.75 / 64)) < 0.01
    assert numbers == 2 * 8 * 64 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    inputs = draw(groups=2, dtype=dtype, size_v=4)
    out = fusion_attention(*inputs, N, "BNSD", scale=0.3, atten_mask=COMPRESSED, sparse_mode=3)[0]
    want = naive(*(x.detach().double() for x in inputs), 0.3, lambda b, n, i, j: j <= i)[0]
    assert out.dtype == dtype
    error = (out.double() - want).norm() / want.norm()
    assert error < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


def test_gradcheck():
    inputs = [x.detach()[:1, :2, :3].requires_grad_() for x in draw(groups=N)]
    mask = torch.eye(3, dtype=torch.bool)
    assert torch.autograd.gradcheck(
        lambda *x: fusion_attention(*x, 2, "BNSD", atten_mask=mask, sparse_mode=1)[0], inputs
    )


def test_the_modes_of_documents():
    for mode, want in ((3, [3, 3, 3]), (7, [3, 3, 4]), (8, [4, 2, 2])):
        assert [document_mode(Options(sparse_mode=mode), n, 3) for n in range(3)] == want


@pytest.mark.parametrize(
    ("layout", "heads", "options", "message"),
    [
        ("BDSN", N, {}, "input_layout=BDSN: use BSH"),
        ("TND", N, {}, r"input_layout=TND and query of shape \(2, 4, 6, 8\)"),
        ("BNSD", 3, {}, "head_num=3 does not match"),
        ("BNSD", N, {"sparse_mode": 9}, "sparse_mode=9: use 0 to 8"),
        ("BNSD", N, {"sparse_mode": 2}, "sparse_mode=2 needs atten_mask"),
        ("BNSD", N, {"sparse_mode": 7, "atten_mask": COMPRESSED}, "is not supported with"),
        ("BNSD", N, {"sparse_mode": 6, "atten_mask": COMPRESSED}, "needs prefix"),
        ("BNSD", N, {"atten_mask": torch.ones(S, S)}, "bool or uint8"),
        ("BNSD", N, {"keep_prob": 0.0}, "keep_prob=0.0"),
        ("BNSD", N, {"pse_type": 4}, "pse_type=4"),
        ("BNSD", N, {"padding_mask": COMPRESSED}, "padding_mask is not supported"),
        ("BNSD", N, {"pse": torch.ones(1, N, 3, S)}, "1 or 6 rows"),
    ],
)
def test_what_is_refused(layout, heads, options, message):
    with pytest.raises(ValueError, match=message):
        fusion_attention(*draw(), heads, layout, **options)
    with pytest.raises(TypeError, match="unknown arguments pre_tockens"):
        fusion_attention(*draw(), N, "BNSD", pre_tockens=3)
