import pytest
import torch

from mindspeed.ops.norm_rotate_qkv import norm_rotate_qkv, npu_impl, triton_impl
from tests.unit.ops.pairwise import pairwise

S, B, GROUPS, QUERIES = 5, 2, 3, 2
EPS = 1e-3


def plain(qkv, q_weight, k_weight, angles, zero_centered=False):
    """Norm and rotate head by head, as the formula reads, with the precision of the inputs."""
    dim, half = k_weight.shape[0], angles.shape[-1] // 2
    gammas = [weight + zero_centered for weight in (q_weight, k_weight)]
    heads = {"q": [], "k": [], "v": []}
    for group in qkv.unbind(2):
        *queries, key, value = group.split(dim, -1)
        for name, members in (("q", queries), ("k", [key])):
            for x in members:
                y = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gammas[name == "k"]
                first, second = y[..., :half], y[..., half : 2 * half]
                cos, sin = angles.cos()[:, :, 0], angles.sin()[:, :, 0]
                heads[name].append(
                    torch.cat(
                        [
                            first * cos[..., :half] - second * sin[..., :half],
                            second * cos[..., half:] + first * sin[..., half:],
                            y[..., 2 * half :],
                        ],
                        -1,
                    )
                )
        heads["v"].append(value)
    return tuple(torch.stack(heads[name], 2) for name in "qkv")


def run(function, *inputs, dtype=None):
    """Return outputs and gradients; gradients come in as strided tensors, as from attention."""
    given = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in inputs]
    outs = function(*given)
    generator = torch.Generator().manual_seed(1)
    grads = [
        torch.randn(out.transpose(0, 1).shape, generator=generator)
        .to(inputs[0].dtype)
        .to(out.dtype)
        .transpose(0, 1)
        for out in outs
    ]
    torch.autograd.backward(outs, grads)
    return [*(out.detach() for out in outs), *(x.grad for x in given)]


def inputs(head, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    qkv = torch.randn(S, B, GROUPS, (QUERIES + 2) * head).to(dtype)
    return qkv, *(torch.randn(head).to(dtype) for _ in range(2))


def sizes(head):
    return [QUERIES * head, head, head]


def relative_errors(got, want):
    return [
        float((ours.double() - exact).norm() / exact.norm())
        for ours, exact in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_reference_is_the_formula_in_float64(zero_centered):
    given = [x.double() for x in inputs(6)]
    freqs = torch.randn(S, B, 1, 4).double()
    want = run(lambda *x: plain(*x, freqs, zero_centered), *given)
    got = run(
        lambda *x: norm_rotate_qkv(*x, freqs, sizes(6), EPS, zero_centered=zero_centered), *given
    )
    assert max(relative_errors(got, want)) < 1e-14


@pairwise(
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16]),
    pytest.mark.parametrize(("dim", "head"), [(8, 8), (6, 12), (12, 12), (2, 6)]),
    pytest.mark.parametrize("zero_centered", [False, True]),
    pytest.mark.parametrize("batch_freqs", [1, B]),
    pytest.mark.parametrize("positions", [None, (S,), (S, B)]),
)
def test_every_implementation_matches_float64(
    positions, batch_freqs, zero_centered, dim, head, dtype
):
    given = inputs(head, dtype)
    freqs = torch.randn(9, batch_freqs, 1, dim) * 9
    angles = freqs[:S]
    if positions is not None:
        freqs = freqs[:, :1]
        positions = torch.randint(0, 9, positions)
        angles = freqs[positions].view(S, -1, 1, dim)
    exact = run(lambda *x: plain(*x, angles.double(), zero_centered), *given, dtype=torch.float64)
    options = {"positions": positions, "zero_centered": zero_centered}
    limit = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for function in (norm_rotate_qkv, triton_impl.norm_rotate_qkv, npu_impl.norm_rotate_qkv):
        got = run(lambda *x, f=function: f(*x, freqs, sizes(head), EPS, **options), *given)
        assert all(x.dtype == dtype for x in got)
        # Ascend rounds between the norm and the rotation.
        allowed = 3 * limit if function is npu_impl.norm_rotate_qkv else limit
        assert max(relative_errors(got, exact)) < allowed


def test_two_runs_have_equal_bits_and_rows_do_not_depend_on_others():
    given, freqs = inputs(8), torch.randn(S, 1, 1, 8)
    call = lambda *x: triton_impl.norm_rotate_qkv(*x, freqs, sizes(8), EPS)  # noqa: E731
    for first, second in zip(run(call, *given), run(call, *given), strict=True):
        assert torch.equal(first, second)
    alone = triton_impl.norm_rotate_qkv(given[0][:2], *given[1:], freqs, sizes(8), EPS)
    for part, whole in zip(alone, call(*given), strict=True):
        assert torch.equal(part, whole[:2])


def test_the_packed_tensor_is_all_that_is_saved():
    qkv, q_weight, k_weight = (x.requires_grad_() for x in inputs(8, torch.bfloat16))
    freqs, saved = torch.randn(S, 1, 1, 8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outs = triton_impl.norm_rotate_qkv(qkv, q_weight, k_weight, freqs, sizes(8), EPS)
    assert sum(x.nbytes for x in saved) == qkv.nbytes + q_weight.nbytes + k_weight.nbytes
    assert saved[0].data_ptr() == qkv.data_ptr()
    assert all(out.untyped_storage().data_ptr() != qkv.data_ptr() for out in outs)


def test_frozen_weights_and_no_tokens():
    qkv, q_weight, k_weight = inputs(8)
    freqs = torch.randn(S, 1, 1, 8)
    want = run(lambda x: plain(x, q_weight, k_weight, freqs), qkv)
    got = run(
        lambda x: triton_impl.norm_rotate_qkv(x, q_weight, k_weight, freqs, sizes(8), EPS), qkv
    )
    assert max(relative_errors(got, [x.double() for x in want])) < 1e-6
    nothing = [x.requires_grad_() for x in (qkv[:0], q_weight, k_weight)]
    outs = triton_impl.norm_rotate_qkv(*nothing, freqs, sizes(8), EPS)
    sum(out.sum() for out in outs).backward()
    assert q_weight.grad.abs().max() == k_weight.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, q, k: (x, q[:4], k), r"q_weight must have the 8 channels .* got \(4,\)"),
        (lambda x, q, k: (x, q, k.half()), "k_weight .* torch.float32, got .* torch.float16"),
        (lambda x, q, k: (x[..., :16], q, k), "qkv must be"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        norm_rotate_qkv(*change(*inputs(8)), torch.randn(S, 1, 1, 8), sizes(8))
