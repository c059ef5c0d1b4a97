"""What needs no Megatron of mindspeed.te, on the GPU against float64 on the cpu."""

import pytest
import torch

from mindspeed.compat.stand_ins.fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32
from mindspeed.ops.cross_entropy import cross_entropy
from mindspeed.ops.norm import rms_norm
from mindspeed.ops.swiglu import swiglu
from mindspeed.te.pytorch.attention.core import Documents, Softmax, attend_batch, attend_documents
from mindspeed.te.pytorch.attention.masks import MaskRule
from mindspeed.te.pytorch.attention.rope import apply_rotary_pos_emb
from mindspeed.te.pytorch.optimizers import FusedAdam
from mindspeed.te.pytorch.permutation import moe_permute_with_probs, moe_unpermute

pytestmark = pytest.mark.gpu
S, B, N, H = 128, 2, 8, 64


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def compare(function, inputs, dtype, rtol):
    """Run on the GPU in `dtype` and on the cpu in float64, forward and backward."""
    results = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        given = [x.to(dtype).to(device, kind).requires_grad_() for x in inputs]
        out = function(*given)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        out.backward(grad.to(dtype).to(device, out.dtype))
        results.append([out.detach(), *(x.grad for x in given)])
    for got, want in zip(*results):
        error = (got.double().cpu() - want.double()).norm() / want.double().norm()
        assert error < rtol, f"relative error {error:.2e}"


TOLERANCES = [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
@pytest.mark.parametrize("head_v", [H, 32])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("kind", ["causal", "padding", "padding_causal", "no_mask", "window"])
def test_attention(kind, groups, head_v, dtype, rtol):
    torch.manual_seed(0)
    inputs = [draw(S, B, N, H), draw(S, B, groups, H), draw(S, B, groups, head_v)]
    hidden = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    hidden[0, ..., -40:] = True
    hidden[1, ..., :3] = True  # with padding_causal the first queries see nothing
    rule = MaskRule.of("causal", (16, 0)) if kind == "window" else MaskRule.of(kind, None)

    def function(q, k, v):
        mask = hidden.to(q.device)
        return attend_batch(q, k, v, rule, Softmax(H**-0.5, 0.0), mask=mask)

    compare(function, inputs, dtype, rtol)


@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
def test_packed_attention(dtype, rtol):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 50, 51, 128])
    documents = Documents.of(bounds, None)
    rule = MaskRule.of("padding_causal", None)

    def function(q, k, v):
        return attend_documents(
            q, k, v, rule, Softmax(H**-0.5, 0.0), of_q=documents, of_k=documents
        )

    compare(function, [draw(S, N, H), draw(S, 2, H), draw(S, 2, H)], dtype, rtol)


def test_long_causal_attention_builds_no_mask():
    length = 16384
    q, k, v = (torch.randn(length, 1, n, H, device="cuda").bfloat16() for n in (4, 1, 1))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend_batch(q, k, v, MaskRule.of("causal", None), Softmax(H**-0.5, 0.0))
    # One bool per query and key alone would be 256 MiB.
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
def test_rows(dtype, rtol):
    torch.manual_seed(0)
    compare(swiglu, [draw(7, 246)], dtype, rtol)
    compare(rms_norm, [draw(5, 7, 123), draw(123)], dtype, rtol)
    target = torch.randint(0, 99, (6, 4))
    target[0, 0] = -100
    compare(
        lambda x: cross_entropy(x, target.to(x.device), smoothing=0.1),
        [draw(6, 4, 99)],
        dtype,
        rtol,
    )
    freqs = draw(10, 1, 1, 16).float()
    compare(
        lambda t: apply_rotary_pos_emb(t, freqs.to(t.device)), [draw(10, 2, 3, 24)], dtype, rtol
    )


@pytest.mark.parametrize(("dtype", "rtol"), TOLERANCES)
def test_permutation(dtype, rtol):
    torch.manual_seed(0)
    routing_map = torch.rand(50, 8) < 0.4
    rows = int(routing_map.sum())

    def function(tokens, probs):
        mapped = routing_map.to(tokens.device)
        moved, weights, row_id_map = moe_permute_with_probs(tokens, probs, mapped, rows)
        return moe_unpermute(moved * weights.unsqueeze(1), row_id_map, probs, tokens.shape)

    compare(function, [draw(50, 16), draw(50, 8)], dtype, rtol)


def test_weight_gradient_is_not_rounded_before_the_sum():
    torch.manual_seed(0)
    x, grad = (torch.randn(512, n, device="cuda").bfloat16() for n in (64, 32))
    main_grad = torch.ones(32, 64, device="cuda")
    wgrad_gemm_accum_fp32(x, grad, main_grad)
    want = 1 + grad.double().T @ x.double()
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-5, atol=1e-4)


def test_fused_adam_equals_torch():
    torch.manual_seed(0)
    start = [torch.randn(33, 7, device="cuda"), torch.randn(5, device="cuda")]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.1}
    pair = FusedAdam(ours, **options), torch.optim.AdamW(theirs, **options)
    for _ in range(10):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in pair:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
