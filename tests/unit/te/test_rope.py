import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from mindspeed.te.pytorch.attention import _SplitAlongDim, apply_rotary_pos_emb
from mindspeed.te.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

S, B, N, H = 6, 3, 2, 8


def angles(positions, dim, interleaved):
    """One angle a pair of channels, laid out for both, (positions, 1, 1, dim)."""
    per_pair = torch.outer(torch.arange(positions).double(), 0.3 ** torch.arange(dim // 2).double())
    laid = per_pair.repeat_interleave(2, -1) if interleaved else torch.cat([per_pair] * 2, -1)
    return laid.view(positions, 1, 1, dim)


def turn(t, positions, dim, interleaved):
    """Multiply pairs of channels, as complex numbers, by e^(i angle); positions broadcast to t."""
    head, rest = t[..., :dim], t[..., dim:]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).mT
    angle = positions.double().unsqueeze(-1) * 0.3 ** torch.arange(dim // 2).double()
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()).double(), angle)
    )
    head = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat([head, rest], -1)


def tokens(*shape, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def check(got, want, t):
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(x, t, grad)[0] for x in (got, want)))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [8, 4])
def test_sequence_first(dim, interleaved):
    t = tokens(S, B, N, H)
    freqs = angles(S + 2, dim, interleaved)
    got = apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", interleaved=interleaved, fused=True)
    check(got, turn(t, torch.arange(S).view(S, 1, 1), dim, interleaved), t)


@pytest.mark.parametrize("interleaved", [True, False])
def test_batch_first(interleaved):
    t = tokens(B, S, N, H)
    got = apply_rotary_pos_emb(t, angles(S, H, interleaved), "bshd", interleaved=interleaved)
    check(got, turn(t, torch.arange(S).view(1, S, 1), H, interleaved), t)


def test_start_positions():
    starts = torch.tensor([4, 0, 2])
    positions = torch.arange(S).view(S, 1) + starts
    t = tokens(S, B, N, H)
    got = apply_rotary_pos_emb(t, angles(S + 4, H, False), start_positions=starts)
    check(got, turn(t, positions.unsqueeze(-1), H, False), t)
    t = tokens(B, S, N, H)
    got = apply_rotary_pos_emb(t, angles(S + 4, H, False), "bshd", start_positions=starts)
    check(got, turn(t, positions.T.unsqueeze(-1), H, False), t)


@pytest.mark.parametrize("interleaved", [True, False])
def test_packed_documents_start_at_zero(interleaved):
    t = tokens(11, N, H)
    bounds = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    # Two tokens of padding behind the last document stay as they are.
    positions = torch.tensor([*range(4), *range(5), 0, 0]).view(11, 1)
    got = apply_rotary_pos_emb(
        t, angles(5, 4, interleaved), "thd", cu_seqlens=bounds, interleaved=interleaved
    )
    check(got, turn(t, positions, 4, interleaved), t)


@pytest.mark.parametrize(
    ("rank", "positions"),
    [(0, [0, 1, 6, 7, 0, 3]), (1, [2, 3, 4, 5, 1, 2])],
)
def test_packed_documents_split_over_two_ranks(rank, positions):
    t = tokens(6, N, H)
    got = apply_rotary_pos_emb(
        t,
        angles(8, H, False),
        tensor_format="thd",
        cu_seqlens=torch.tensor([0, 8, 12], dtype=torch.int32),
        cp_size=2,
        cp_rank=rank,
    )
    check(got, turn(t, torch.tensor(positions).view(6, 1), H, False), t)


@pytest.mark.parametrize("interleaved", [True, False])
def test_equals_megatron(interleaved):
    t = tokens(S, B, N, H, dtype=torch.float32)
    freqs = angles(S, 4, interleaved).float()
    want = _apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)
    check(apply_rotary_pos_emb(t, freqs, interleaved=interleaved), want, t)


def test_low_precision_is_rounded_once():
    t = tokens(S, B, N, H, dtype=torch.bfloat16)
    got = apply_rotary_pos_emb(t, angles(S, H, False).float())
    want = turn(t.double(), torch.arange(S).view(S, 1, 1), H, False)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


def test_queries_and_keys_out_of_one_tensor():
    groups, per_group = 2, 3
    sizes = [per_group * H, H, H]
    qkv = tokens(S, B, groups, sum(sizes))
    freqs = angles(S, H, False)
    got = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, sizes)
    query, key, value = qkv.split(sizes, dim=-1)
    positions = torch.arange(S).view(S, 1, 1)
    want = turn(query.reshape(S, B, groups * per_group, H), positions, H, False)
    check(got[0], want, qkv)
    check(got[1], turn(key, positions, H, False), qkv)
    assert torch.equal(got[2], value)


@pytest.mark.parametrize(
    ("tensor_format", "message"), [("thd", "needs cu_seqlens"), ("dhsb", "use sbhd, bshd or thd")]
)
def test_bad_format(tensor_format, message):
    with pytest.raises(ValueError, match=message):
        apply_rotary_pos_emb(tokens(S, B, H), angles(S, H, False), tensor_format)


def test_split_along_dim():
    x = tokens(4, 3)
    parts = _SplitAlongDim.apply(x, 0, [1, 3])
    assert [p.shape for p in parts] == [(1, 3), (3, 3)]
    (2 * parts[0].sum() + parts[1].sum()).backward()
    assert x.grad.tolist() == [[2.0] * 3] + [[1.0] * 3] * 3
    squeezed = _SplitAlongDim.apply(x, 0, [1, 1, 1, 1], True)
    assert [p.shape for p in squeezed] == [(3,)] * 4
