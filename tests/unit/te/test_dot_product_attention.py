"""B batch, S sequence, N heads, G key / value heads, H head size."""

from contextlib import contextmanager

import pytest
import torch

from mindspeed.te.pytorch import DotProductAttention
from mindspeed.te.pytorch.attention.core import Documents

S, B, N, H = 7, 2, 4, 8


def dense(q, k, v, visible=None, *, scale=None, bias=0.0):
    """Attention written out in float64: (S, B, N, H) -> (S, B, N * H)."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (H**-0.5 if scale is None else scale) + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e30))
    total = weights.sum(-1, keepdim=True)
    out = weights / torch.where(total > 0, total, 1.0) @ v
    return out.permute(2, 0, 1, 3).flatten(2)


def make(s_k=S, groups=N, head_v=H, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (S, B, N, H), (s_k, B, groups, H), (s_k, B, groups, head_v)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def check(out, want, inputs, rtol=1e-9):
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=rtol)
    grad = torch.randn_like(want)
    got = torch.autograd.grad(out, inputs, grad.to(out.dtype))
    expected = torch.autograd.grad(want, inputs, grad)
    for name, one, other in zip("qkv", got, expected):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol, msg=lambda m, n=name: n + m)


def band(s_q, s_k, offset=0, left=None):
    query, key = torch.arange(s_q).unsqueeze(1) + offset, torch.arange(s_k)
    visible = key <= query
    return visible if left is None else visible & (key >= query - left)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("head_v", [8, 5])
def test_causal_with_grouped_queries_and_other_value_size(groups, head_v):
    inputs = make(groups=groups, head_v=head_v)
    attention = DotProductAttention(N, (H, head_v), num_gqa_groups=groups)
    out = attention(*inputs)
    assert out.shape == (S, B, N * head_v)
    check(out, dense(*inputs, band(S, S)), inputs)


def test_causal_ignores_a_mask_and_builds_none(monkeypatch):
    inputs = make()
    want = dense(*inputs, band(S, S))
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append(kwargs["attn_mask"])
        return real(*args, **kwargs)

    monkeypatch.setattr("mindspeed.ops.fusion_attention.sdpa.scaled_dot_product_attention", spy)
    hide_all = torch.ones(B, 1, S, S, dtype=torch.bool)
    check(DotProductAttention(N, H)(*inputs, hide_all), want, inputs)
    assert seen == [None]


@pytest.mark.parametrize("s_k", [S, 11])
def test_no_mask_and_scale(s_k):
    inputs = make(s_k=s_k)
    attention = DotProductAttention(N, H, attn_mask_type="no_mask", softmax_scale=0.3)
    check(attention(*inputs), dense(*inputs, scale=0.3), inputs)


@pytest.mark.parametrize("s_k", [S, 11])
def test_causal_bottom_right(s_k):
    inputs = make(s_k=s_k)
    out = DotProductAttention(N, H)(*inputs, attn_mask_type="causal_bottom_right")
    check(out, dense(*inputs, band(S, s_k, s_k - S)), inputs)


@pytest.mark.parametrize("s_k", [S, 11])
def test_causal_counts_from_the_top_left(s_k):
    inputs = make(s_k=s_k)
    check(DotProductAttention(N, H)(*inputs), dense(*inputs, band(S, s_k)), inputs)


@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right", "no_mask"])
def test_window(mask_type):
    inputs = make()
    out = DotProductAttention(N, H, attn_mask_type=mask_type, window_size=(2, 0))(*inputs)
    check(out, dense(*inputs, band(S, S, left=2)), inputs)


def test_window_on_both_sides():
    inputs = make()
    out = DotProductAttention(N, H)(*inputs, attn_mask_type="no_mask", window_size=(1, 2))
    far = torch.arange(S) - torch.arange(S).unsqueeze(1)
    check(out, dense(*inputs, (far >= -1) & (far <= 2)), inputs)


def padding(s_k):
    hidden = torch.zeros(B, 1, 1, s_k, dtype=torch.bool)
    hidden[0, ..., -2:] = True
    hidden[1, ..., 0] = True
    return hidden


@pytest.mark.parametrize("groups", [4, 2])
def test_padding(groups):
    inputs = make(groups=groups)
    out = DotProductAttention(N, H, groups, attn_mask_type="padding")(*inputs, padding(S))
    check(out, dense(*inputs, ~padding(S)), inputs)


def test_one_mask_for_all_samples():
    inputs = make()
    hidden = ~band(S, S, left=2)
    out = DotProductAttention(N, H, attn_mask_type="padding")(*inputs, hidden.unsqueeze(0))
    check(out, dense(*inputs, ~hidden), inputs)


def test_padding_of_cross_attention_is_a_pair():
    inputs = make(s_k=11)
    attention = DotProductAttention(N, H, attn_mask_type="padding", attention_type="cross")
    check(attention(*inputs, (padding(S), padding(11))), dense(*inputs, ~padding(11)), inputs)


def test_padding_and_causal_leave_blind_queries_at_zero():
    inputs = make()
    attention = DotProductAttention(N, H, attn_mask_type="padding_causal")
    out = attention(*inputs, padding(S))
    # The first query of the second sample sees only a hidden key.
    assert (out[0, 1] == 0).all()
    check(out, dense(*inputs, ~padding(S) & band(S, S)), inputs)


@pytest.mark.parametrize("per_sample", [True, False])
def test_arbitrary(per_sample):
    inputs = make(s_k=11)
    hidden = torch.rand(B if per_sample else 1, 1, S, 11) < 0.5
    hidden[..., 0] = False
    out = DotProductAttention(N, H, attn_mask_type="arbitrary")(*inputs, hidden)
    check(out, dense(*inputs, ~hidden), inputs)


@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_bias_and_its_gradient(kind, mask_type):
    inputs = make()
    bias = torch.randn(1, N, S, S, dtype=torch.float64, requires_grad=True)
    out = DotProductAttention(N, H, attn_mask_type=mask_type)(
        *inputs, core_attention_bias_type=kind, core_attention_bias=bias
    )
    added = bias * (H**-0.5 if kind == "pre_scale_bias" else 1.0)
    visible = band(S, S) if mask_type == "causal" else None
    check(out, dense(*inputs, visible, bias=added), [*inputs, bias])


def test_batch_first_format():
    inputs = make()
    attention = DotProductAttention(N, H)
    flipped = (x.transpose(0, 1) for x in inputs)
    out = attention(*flipped, qkv_format="bshd")
    assert out.shape == (B, S, N * H)
    check(out.transpose(0, 1), dense(*inputs, band(S, S)), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    inputs = make(dtype=dtype)
    out = DotProductAttention(N, H)(*inputs)
    assert out.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), dense(*inputs, band(S, S)), rtol=rtol, atol=rtol)


def packed(lengths, paddings, heads):
    torch.manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    padded = torch.tensor([0, *(n + p for n, p in zip(lengths, paddings))]).cumsum(0).int()
    x = torch.randn(int(padded[-1]), heads, H, dtype=torch.float64, requires_grad=True)
    return x, bounds, padded


@pytest.mark.parametrize("mask_type", ["padding_causal", "padding"])
@pytest.mark.parametrize("paddings", [(0, 0, 0), (1, 0, 3)])
def test_packed_documents_do_not_see_each_other(mask_type, paddings):
    lengths = (5, 1, 4)
    q, bounds, padded = packed(lengths, paddings, N)
    k, v = (packed(lengths, paddings, 2)[0] + i for i in range(2))
    out = DotProductAttention(N, H, num_gqa_groups=2)(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type=mask_type,
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=5,
        max_seqlen_kv=5,
    )
    assert out.shape == (sum(lengths) + sum(paddings), N * H)
    want = torch.zeros_like(out)
    for start, n in zip(padded.tolist(), lengths):
        document = (x[start : start + n].unsqueeze(1) for x in (q, k, v))
        visible = band(n, n) if mask_type == "padding_causal" else None
        want[start : start + n] = dense(*document, visible).squeeze(1)
    check(out, want, [q, k, v])


def test_packed_without_padding_needs_no_padded_lengths():
    q, bounds, _ = packed((3, 6), (0, 0), N)
    attention = DotProductAttention(N, H, attn_mask_type="padding_causal")
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    out = attention(q, q, q, qkv_format="thd", **lengths)
    alone = attention(*[q[3:].unsqueeze(1)] * 3, attn_mask_type="causal")
    torch.testing.assert_close(out[3:], alone.squeeze(1))


class Tracker:
    """Counts forks and gives each its own seed, like Megatron's tracker."""

    def __init__(self):
        self.state = torch.Generator().manual_seed(7).get_state()
        self.forks = 0

    def get_states(self):
        return {"model-parallel-rng": self.state}

    def set_states(self, states):
        self.state = states["model-parallel-rng"]

    @contextmanager
    def fork(self):
        self.forks += 1
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


def test_dropout_draws_from_the_tracker():
    inputs = make()
    tracker = Tracker()
    attention = DotProductAttention(N, H, None, 0.5, get_rng_state_tracker=lambda: tracker)
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    dropped = attention(*inputs)
    assert tracker.forks == 1
    assert torch.equal(torch.get_rng_state(), outside)
    assert not torch.allclose(dropped, attention(*inputs))

    torch.set_rng_state(Tracker().state)
    alone = DotProductAttention(N, H, None, 0.5)(*inputs)
    assert torch.equal(dropped, alone)

    attention.eval()
    torch.testing.assert_close(attention(*inputs), dense(*inputs, band(S, S)))
    assert tracker.forks == 2


def test_dropout_under_sequence_parallelism_leaves_the_tracker_to_the_caller():
    tracker = Tracker()
    attention = DotProductAttention(
        N, H, None, 0.5, get_rng_state_tracker=lambda: tracker, sequence_parallel=True
    )
    attention(*make())
    assert tracker.forks == 0


def test_dropout_keeps_the_mean():
    v = torch.ones(S, 400, N, H)
    out = DotProductAttention(N, H, None, 0.25, attn_mask_type="no_mask")(v, v, v)
    assert abs(out.mean().item() - 1.0) < 0.02
    assert out.std() > 0.1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_attention_equals_the_plain_one(dropout):
    results = []
    for checkpointed in (False, True):
        inputs = make()
        tracker = Tracker()
        attention = DotProductAttention(
            N, H, None, dropout, get_rng_state_tracker=lambda tracker=tracker: tracker
        )
        out = attention(*inputs, checkpoint_core_attention=checkpointed)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs), tracker.state])
    assert all(torch.equal(one, other) for one, other in zip(*results))


def test_state_dict_is_empty_and_swallows_foreign_fp8_state():
    model = torch.nn.Sequential(DotProductAttention(N, H))
    assert model.state_dict() == {}
    model.load_state_dict({"0._extra_state": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({"0.weight": torch.zeros(3)})


class Group:
    """A process group as far as its size."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def test_context_parallelism_says_that_it_is_not_there_yet():
    with pytest.raises(RuntimeError, match="context_parallel_size=2.*later release"):
        DotProductAttention(N, H, cp_group=Group(2))
    with pytest.raises(RuntimeError, match="context_parallel_size=4"):
        DotProductAttention(N, H, cp_group=[Group(1), Group(4)])
    attention = DotProductAttention(N, H, cp_group=Group(1))
    attention(*make())
    attention.set_context_parallel_group(Group(2), [0, 1], None, "a2a")
    assert attention.cp_comm_type == "a2a"
    with pytest.raises(RuntimeError, match="context_parallel_size=1"):
        attention(*make())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attn_mask_type": "diagonal"},
            "attn_mask_type=diagonal is not known: use no_mask, causal",
        ),
        ({"softmax_type": "learnable"}, "softmax_type=learnable is not supported: use vanilla"),
        ({"num_gqa_groups": 3}, "num_gqa_groups=3"),
        ({"num_gqa_groups": 2, "tp_size": 4}, "tp_size=4.*tp_size must divide both"),
    ],
)
def test_bad_construction(options, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(N, H, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_format": "hdbs"}, "qkv_format=hdbs is not known: use sbhd, bshd, thd"),
        ({"attn_mask_type": "padding"}, "needs an attention_mask"),
        ({"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(2, 2)}, "bool tensor of 4"),
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type=alibi: use no_bias"),
        ({"qkv_format": "thd"}, "needs cu_seqlens_q"),
    ],
)
def test_bad_call(options, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(N, H)(*make(), **options)


def test_the_window_that_is_told_is_the_one_in_force():
    def window(mask_type, given=None):
        return DotProductAttention(4, 8, attn_mask_type=mask_type, window_size=given).window_size

    assert window("causal") == (-1, 0) and window("causal", (3, 5)) == (3, 0)
    assert window("no_mask") == (-1, -1) and window("no_mask", (3, 5)) == (3, 5)


def test_a_call_without_causality_sees_all_keys_of_a_causal_module():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 1, 2, 4) for _ in range(3))
    causal = DotProductAttention(2, 4, attn_mask_type="causal")
    free = DotProductAttention(2, 4, attn_mask_type="no_mask")
    assert torch.equal(causal(q, k, v, attn_mask_type="no_mask"), free(q, k, v))
    assert not torch.equal(causal(q, k, v), free(q, k, v))


@pytest.mark.parametrize(
    "given, told", [(None, (-1, 0)), ((4, 4), (4, 0)), ((4, 0), (4, 0)), ([4, 0], [4, 0])]
)
def test_the_window_in_force_is_told_as_it_was_given(given, told):
    assert DotProductAttention(2, 4, attn_mask_type="causal", window_size=given).window_size == told


def test_cumulative_lengths_are_read_once_and_again_when_they_change():
    bounds = torch.tensor([0, 4, S])
    first = Documents.of(bounds, None)
    assert (first.starts, first.lengths) == ([0, 4], [4, S - 4])
    assert Documents.of(bounds, None).lengths == first.lengths
    bounds[1] = 2
    assert Documents.of(bounds, None).lengths == [2, S - 2]
    assert first.fill(S) and not first.fill(S + 1)
    assert not Documents.of(bounds, bounds + torch.tensor([0, 1, 1])).fill(S + 1)
    with torch.inference_mode():
        assert Documents.of(torch.tensor([0, 3]), None).lengths == [3]
