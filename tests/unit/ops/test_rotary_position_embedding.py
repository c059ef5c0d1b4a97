from types import SimpleNamespace

import pytest
import torch

from mindspeed.ops.rotary_position_embedding import (
    rotary_position_embedding,
    rotate_qk,
    rotate_qkv,
    triton_impl,
)
from tests.unit.ops.pairwise import pairwise

BOTH = pytest.mark.parametrize("interleaved", [False, True])


def rotated(x, cos, sin, interleaved):
    """Turn pair by pair, as the formula reads, in float64."""
    x, cos, sin = (t.double().expand_as(x) for t in (x, cos, sin))
    half = x.shape[-1] // 2
    y = x.clone()
    for n in range(half):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + half)
        y[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        y[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return y


def by_angles(x, angles, interleaved):
    dim = angles.shape[-1]
    head = rotated(x[..., :dim], angles.double().cos(), angles.double().sin(), interleaved)
    return torch.cat([head, x[..., dim:].double()], -1)


def run(function, *inputs):
    given = [x.detach().clone().requires_grad_() for x in inputs]
    outs = function(*given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    torch.autograd.backward(outs, grads)
    return [*(out.detach() for out in outs), *(x.grad for x in given)]


def compare(got, want, dtype):
    for ours, exact in zip(got, want, strict=True):
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert error < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pairwise(
    BOTH,
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16]),
    pytest.mark.parametrize(
        ("shape", "table"),
        [
            ((2, 3, 5, 12), (1, 1, 5, 12)),  # BNSD
            ((2, 5, 3, 12), (1, 5, 1, 12)),  # BSND
            ((5, 2, 3, 12), (5, 1, 1, 12)),  # SBND
            ((2, 3, 5, 12), (2, 1, 5, 12)),
            ((2, 3, 5, 12), (2, 3, 5, 12)),  # nothing shared
        ],
    ),
)
def test_tables_match_float64(shape, table, dtype, interleaved):
    torch.manual_seed(0)
    x, cos, sin = (torch.randn(s).to(dtype) for s in (shape, table, table))
    want = run(lambda x: rotated(x, cos, sin, interleaved), x.double())
    for function in (rotary_position_embedding, triton_impl.rotary_position_embedding):
        compare(run(lambda x, f=function: f(x, cos, sin, int(interleaved)), x), want, dtype)


@BOTH
def test_tables_have_gradients_too(interleaved):
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    tables = [torch.randn(1, 1, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for function in (rotary_position_embedding, triton_impl.rotary_position_embedding):
        assert torch.autograd.gradcheck(function, (x, *tables, int(interleaved)))


@pairwise(
    BOTH,
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
    pytest.mark.parametrize(("dim", "head"), [(8, 8), (6, 10)]),
    pytest.mark.parametrize("batch_freqs", [1, 2]),
)
def test_queries_and_keys(batch_freqs, dim, head, dtype, interleaved):
    torch.manual_seed(0)
    q, k = torch.randn(5, 2, 6, head).to(dtype), torch.randn(5, 2, 2, head).to(dtype)
    freqs = torch.randn(7, batch_freqs, 1, dim) * 9
    want = run(lambda *x: tuple(by_angles(t, freqs[:5], interleaved) for t in x), q, k)
    for function in (rotate_qk, triton_impl.rotate_qk):
        got = run(lambda q, k, f=function: f(q, k, freqs, None, interleaved), q, k)
        assert all(x.dtype == dtype for x in got)
        compare(got, want, dtype)


@pytest.mark.parametrize("shape", [(5,), (5, 2)])
def test_positions(shape):
    torch.manual_seed(0)
    q, freqs = torch.randn(5, 2, 6, 8), torch.randn(20, 1, 1, 8) * 9
    positions = torch.randint(0, 20, shape)
    angles = freqs[positions].view(5, -1, 1, 8)
    want = run(lambda q: by_angles(q, angles, False), q)
    for function in (rotate_qk, triton_impl.rotate_qk):
        compare(run(lambda q, f=function: f(q, None, freqs, positions)[0], q), want, torch.float32)


@BOTH
@pytest.mark.parametrize("dim", [8, 4])
def test_packed(dim, interleaved):
    torch.manual_seed(0)
    qkv, freqs = torch.randn(5, 2, 3, 4 * 8), torch.randn(5, 1, 1, dim) * 9

    def apart(qkv):
        q, k, v = qkv.double().split([16, 8, 8], -1)
        q = q.reshape(5, 2, 6, 8)
        return by_angles(q, freqs, interleaved), by_angles(k, freqs, interleaved), v

    want = run(apart, qkv)
    for function in (rotate_qkv, triton_impl.rotate_qkv):
        got = run(lambda x, f=function: f(x, freqs, [16, 8, 8], interleaved), qkv)
        compare(got, want, torch.float32)


def test_packed_with_positions():
    torch.manual_seed(0)
    qkv, freqs = torch.randn(5, 2, 3, 4 * 8), torch.randn(4, 1, 1, 8) * 9
    positions = torch.tensor([0, 1, 2, 0, 3])

    def apart(qkv):
        q, k, v = qkv.double().split([16, 8, 8], -1)
        angles = freqs[positions]
        q, k = (by_angles(x, angles, False) for x in (q.reshape(5, 2, 6, 8), k))
        return q, k, v

    want = run(apart, qkv)
    for function in (rotate_qkv, triton_impl.rotate_qkv):
        got = run(lambda x, f=function: f(x, freqs, [16, 8, 8], positions=positions), qkv)
        compare(got, want, torch.float32)


def test_strided_inputs_and_unwritten_numbers(monkeypatch):
    torch.manual_seed(0)
    full, freqs = torch.randn(4, 5, 3, 24), torch.randn(5, 1, 1, 8)
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x).fill_(float("nan")))
    for x in (full.transpose(0, 1)[..., 8:16], full.transpose(0, 1)[..., ::3]):
        want = run(lambda x: by_angles(x, freqs, False), x)
        compare(run(lambda x: triton_impl.rotate_qk(x, None, freqs)[0], x), want, torch.float32)


def test_the_tables_are_all_that_is_kept_and_are_made_once():
    q, k, freqs = torch.randn(5, 2, 6, 8), torch.randn(5, 2, 2, 8), torch.randn(5, 1, 1, 8)
    outs = [
        triton_impl.rotate_qk(q.requires_grad_(), k.requires_grad_(), freqs)[0] for _ in range(2)
    ]
    first, second = (out.grad_fn.table for out in outs)
    assert first.cos is second.cos and first.sin is second.sin
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        triton_impl.rotate_qk(q, k, freqs)
    assert saved == []
    # Angles that were changed in place make new tables.
    freqs.mul_(2)
    changed = triton_impl.rotate_qk(q, None, freqs)[0]
    compare([changed], [by_angles(q, freqs, False)], torch.float32)


def test_no_tokens():
    x, freqs = torch.randn(0, 2, 3, 8, requires_grad=True), torch.randn(4, 1, 1, 8)
    triton_impl.rotate_qk(x, None, freqs)[0].sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, t: rotary_position_embedding(x, t, t, 2), "mode=2: use 0"),
        (lambda x, t: rotary_position_embedding(x[0], t, t), "x of 4 dimensions"),
        (lambda x, t: rotary_position_embedding(x[..., :7], t, t), "even head size below 896"),
        (lambda x, t: rotary_position_embedding(x, t, t[..., :4]), r"one shape that broadcasts"),
        (lambda x, t: rotate_qk(x, x[:2], t), r"one S and B, got \(2, 2, 3, 8\)"),
        (lambda x, t: rotate_qk(x, None, t[:3]), "has 3 positions, the sequence has 4"),
        (lambda x, t: rotate_qk(x[..., :6], None, t), "rotates 8 channels, the heads have 6"),
        (lambda x, t: rotate_qk(x, None, t[:, 0]), r"freqs must be \(positions, 1 or 2, 1"),
        (lambda x, t: rotate_qkv(x, t, [4, 2, 4]), r"\(4, 2, 3, 8\) to split in \[4, 2, 4\]"),
        (lambda x, t: rotate_qkv(x, t, [4, 2, 2]), "do not fit heads of 2"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(4, 2, 3, 8), torch.randn(4, 1, 1, 8))


def test_inference_mode():
    with torch.inference_mode():
        q, freqs = torch.randn(5, 2, 6, 8), torch.randn(5, 1, 1, 8)
        got = triton_impl.rotate_qk(q, None, freqs)[0]
        compare([got], [by_angles(q, freqs, False)], torch.float32)


def test_angles_of_tokens_in_packed_documents_are_left_to_megatron():
    """Multimodal positions: one row of angles for each token, whichever document it is in."""
    from mindspeed.ops.rotary_position_embedding.megatron import wrap_apply_rotary_pos_emb

    config = SimpleNamespace(
        mrope_section=[2, 1, 1],
        context_parallel_size=1,
        multi_latent_attention=False,
        rotary_interleaved=False,
    )
    called = []
    rotate = wrap_apply_rotary_pos_emb(lambda *args, **_: called.append(args[3]))
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    rotate(torch.randn(10, 2, 8), torch.randn(10, 1, 1, 8), config, bounds)
    assert called and called[0] is bounds
