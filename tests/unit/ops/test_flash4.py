"""How flash-attn-4 is called and when; its kernels are stood in for by plain torch."""

import logging
import sys
import types
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch.utils.flop_counter
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mindspeed import device
from mindspeed.device import hopper
from mindspeed.ops.fusion_attention import flash4, sdpa
from mindspeed.ops.fusion_attention.kept import KeptResults
from mindspeed.te.pytorch.attention.dot_product_attention import DotProductAttention
from tests.unit.ops import kernel_files
from tests.unit.ops.pairwise import pairwise
from tests.unit.ops.plain_flash4 import backward, forward, scores


@pytest.fixture
def package(monkeypatch):
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    modules = [types.ModuleType(name) for name in names]
    for module in modules:
        module.__spec__, module.__path__ = SimpleNamespace(name=module.__name__), []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    modules[-1]._flash_attn_fwd, modules[-1]._flash_attn_bwd = forward, backward
    install(monkeypatch)


def install(monkeypatch, version="4.0.0b36"):
    kernel_files.install(monkeypatch, {"flash-attn-4": version})


@pytest.fixture
def on_hopper(monkeypatch):
    options = {"capability": lambda: (9, 0), "index": lambda: 0, "name": "cuda"}
    seeming = SimpleNamespace(torch_device=torch.device("cpu"), **options)
    monkeypatch.setattr(device, "current", lambda: seeming)
    monkeypatch.setattr(hopper, "kernel_cache", lambda: None)  # there are no kernels to keep
    for answer in (hopper._is_usable, flash4._passes_trial, flash4.prepare):
        answer.cache_clear()
    yield
    for answer in (hopper._is_usable, flash4._passes_trial, flash4.prepare):
        answer.cache_clear()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("groups", [6, 2, 1])
def test_layouts_and_gradients(package, groups, is_causal):
    torch.manual_seed(0)
    draw = [torch.randn(5, 2, heads, 8, dtype=torch.float64) for heads in (6, groups, groups)]
    ours, plain = ([x.permute(1, 2, 0, 3).requires_grad_() for x in draw] for _ in range(2))
    ours = [x.detach().requires_grad_() for x in ours]
    got = flash4.attention(*ours, 0.3, is_causal)
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
    want = scaled_dot_product_attention(*plain, **options)
    assert got.stride() == ours[0].stride()
    grad = torch.randn_like(want)
    grads = torch.autograd.grad(got, ours, grad)
    torch.testing.assert_close([got, *grads], [want, *torch.autograd.grad(want, plain, grad)])
    lse = flash4.attention_lse(*ours, 0.3, is_causal)[1]
    tokens_first = [x.detach().transpose(1, 2) for x in ours[:2]]
    torch.testing.assert_close(lse, scores(*tokens_first, 0.3, is_causal)[1])
    assert not lse.requires_grad


def pack(of_q, of_k):
    """Return documents of such lengths."""
    bounds = (torch.tensor([0, *accumulate(of)], dtype=torch.int32) for of in (of_q, of_k))
    return flash4.Documents(*bounds, max(of_q), max(of_k))


def one_by_one(q, k, v, of_q, of_k, is_causal, scale):
    """Attend each document by torch's attention; return the log-sum-exp of its scores too."""
    found, sums = [], []
    for each in zip(q.split(of_q), k.split(of_k), v.split(of_k)):
        q, k, v = (x.transpose(0, 1) for x in each)
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        seen = seen.tril(k.shape[1] - q.shape[1]) if is_causal else seen
        options = {"attn_mask": seen, "scale": scale, "enable_gqa": True}
        found.append(scaled_dot_product_attention(q, k, v, **options).transpose(0, 1))
        scores = torch.einsum("gnqh,gkh->gnqk", q.unflatten(0, (len(k), -1)), k) * scale
        sums.append(scores.masked_fill(~seen, float("-inf")).logsumexp(-1).flatten(0, 1))
    return torch.cat(found), torch.cat(sums, -1)


@pytest.fixture(params=[False, True])
def _repeatable(request):
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("package", "_repeatable")
@pairwise(
    pytest.mark.parametrize("is_causal", [True, False]),
    pytest.mark.parametrize("groups", [6, 2, 1]),
    pytest.mark.parametrize("of_k", [(5, 1, 7), (5, 4, 8)]),
)
def test_packed_documents(of_k, groups, is_causal):
    torch.manual_seed(0)
    of_q = (5, 1, 7)
    sizes = (sum(of_q), 6), (sum(of_k), groups), (sum(of_k), groups)
    given = [torch.randn(*size, 8, dtype=torch.float64, requires_grad=True) for size in sizes]
    got, lse = flash4.packed_attention_lse(*given, 0.3, is_causal, pack(of_q, of_k))
    want, sums = one_by_one(*given, of_q, of_k, is_causal, 0.3)
    grad = torch.randn_like(want)
    grads = torch.autograd.grad(got, given, grad)
    torch.testing.assert_close([got, *grads], [want, *torch.autograd.grad(want, given, grad)])
    torch.testing.assert_close(lse, sums.detach())
    assert not lse.requires_grad


def test_bounds_that_change_before_backward_are_noticed(package):
    given = [torch.randn(6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    documents = pack((2, 4), (2, 4))
    out, _ = flash4.packed_attention_lse(*given, 0.3, True, documents)
    documents.cu_seqlens_q[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("is_causal", [True, False])
def test_torchs_packed_attention_gives_way(package, on_hopper, is_causal):
    torch.manual_seed(0)
    lengths = (600, 1448)
    inputs = [torch.randn(2048, heads, 64, dtype=torch.float64) for heads in (2, 1, 1)]
    documents = pack(lengths, lengths)
    options = {"scale": 0.3, "dropout": 0.0, "window": (-1, 0 if is_causal else -1)}
    got = sdpa.flash_attention(*inputs, documents=documents, **options)
    torch.testing.assert_close(got, one_by_one(*inputs, lengths, lengths, is_causal, 0.3)[0])


def test_where_it_serves(package, on_hopper):
    with torch.device("meta"):
        q, k = torch.empty(1, 4, 2048, 128), torch.empty(1, 2, 2048, 128)
    assert flash4.supports(q, k, k, True, 0.0)
    assert not flash4.supports(q, k, k, True, 0.1)
    assert not flash4.supports(q[..., :96], k[..., :96], k[..., :96], True, 0.0)
    assert not flash4.supports(q, k, k[..., :64], True, 0.0)
    assert not flash4.supports(q[:, :, :2047], k, k, False, 0.0)
    assert not flash4.supports(q.mT.contiguous().mT, k, k, True, 0.0)
    assert flash4.supports(q, k[:, :, :99], k[:, :, :99], False, 0.0)
    assert not flash4.supports(q, k[:, :, :99], k[:, :, :99], True, 0.0)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not flash4.supports(q, k, k, True, 0.0)


def test_when_it_supports_packed_documents(package, on_hopper):
    with torch.device("meta"):
        q, k = torch.empty(2048, 4, 128), torch.empty(2048, 2, 128)
    documents, causal = pack((1536, 512), (1024, 1024)), (-1, 0)
    assert flash4.supports_packed(q, k, k, causal, documents, 0.0)
    assert flash4.supports_packed(q, k, k, (-1, -1), documents, 0.0)
    assert not flash4.supports_packed(q, k, k, (99, 0), documents, 0.0)
    assert not flash4.supports_packed(q, k, k, (-1, 1), documents, 0.0)
    assert not flash4.supports_packed(q, k, k, causal, documents, 0.1)
    assert not flash4.supports_packed(q, k, k[..., :64], causal, documents, 0.0)
    assert not flash4.supports_packed(q[..., :96], k[..., :96], k[..., :96], causal, documents, 0.0)
    assert not flash4.supports_packed(q.mT.contiguous().mT, k, k, causal, documents, 0.0)
    assert not flash4.supports_packed(q[:2047], k, k, causal, documents, 0.0)
    short = pack((511,) * 4 + (4,), (512,) * 4)
    assert not flash4.supports_packed(q, k, k, causal, short, 0.0)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not flash4.supports_packed(q, k, k, causal, documents, 0.0)


@pytest.fixture
def no_flash():
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)


def test_flash_attention_that_is_switched_off_stays_off(package, on_hopper, no_flash):
    with torch.device("meta"):
        dense, packed = torch.empty(1, 4, 2048, 128), torch.empty(2048, 4, 128)
    assert not flash4.supports(dense, dense, dense, True, 0.0)
    documents = pack((2048,), (2048,))
    assert not flash4.supports_packed(packed, packed, packed, (-1, 0), documents, 0.0)


BROKEN = "raise AttributeError('the compiler has no such thing')"


@pytest.fixture
def on_disk(monkeypatch, tmp_path, on_hopper):
    """Lay a `flash_attn.cute` that raises at its import where Python finds it."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "interface.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("flash_attn.cute", "flash_attn"):
        sys.modules.pop(name, None)


def test_an_early_one_of_another_package_is_silent(on_disk, caplog):
    assert not hopper.FLASH_ATTENTION.is_here() and not caplog.records


def test_one_that_does_not_load_gives_a_warning(on_disk, monkeypatch, caplog):
    install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert not hopper.FLASH_ATTENTION.is_here()
    assert "flash-attn-4 is installed and cannot be used: the compiler has no such" in caplog.text


def test_one_that_is_too_old_gives_a_warning(package, monkeypatch, on_hopper, caplog):
    install(monkeypatch, "4.0.0b4")
    with caplog.at_level(logging.WARNING):
        assert not hopper.FLASH_ATTENTION.is_here()
    assert "4.0.0b4 is not >=4.0.0b36,<4.1" in caplog.text


def fails(*args, **kwargs):
    raise TypeError("no fail-closed semantic key\nfor this source")


def wrong(*args, **kwargs):
    return tuple(grad + 1 for grad in backward(*args, **kwargs))


@pytest.mark.parametrize(
    ("failing", "reason"),
    [(fails, "no fail-closed semantic key"), (wrong, "its results are wrong")],
)
def test_one_whose_kernels_fail_is_left_alone(
    package, on_hopper, monkeypatch, caplog, failing, reason
):
    q = torch.zeros(1, 2, 2048, 64)
    module = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(module, "_flash_attn_bwd", failing)
    with caplog.at_level(logging.WARNING):
        assert not flash4.supports(q, q, q, True, 0.0) and not flash4.supports(q, q, q, True, 0.0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        line == f"flash-attn-4 is not used for 2 heads (2 of keys) of 64, torch.float32: {reason}"
    )


def test_the_trial_is_no_result_of_a_layer_that_is_recomputed(package, on_hopper, monkeypatch):
    """The first layer of a run is the first to ask for the kernels."""
    monkeypatch.setattr(flash4, "HEAD_DIMS", (8,))
    monkeypatch.setattr(flash4, "MIN_TOKENS", 1)
    asked = []

    def layer(x):
        asked.append(flash4.supports(x, x, x, True, 0.0))
        return flash4.attention(x, x, x, 0.3, True)

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    plain = torch.autograd.grad(flash4.attention(x, x, x, 0.3, True).square().sum(), x)[0]
    flash4._passes_trial.cache_clear()
    kept = checkpoint(KeptResults().wrap_function(layer), x, use_reentrant=True)
    kept.square().sum().backward()
    assert asked == [True, True] and torch.equal(x.grad, plain)


@pytest.mark.usefixtures("_repeatable")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_processes_compile_the_kernels_of_the_trial(
    package, on_hopper, monkeypatch, is_causal, is_packed
):
    calls, module = kernel_files.Calls(), sys.modules["flash_attn.cute.interface"]
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        monkeypatch.setattr(module, name, calls.noting(name, getattr(module, name)))
    which = flash4._Heads(torch.float32, 4, 2, 64, is_causal, is_packed)
    needed = calls.of(lambda: flash4._trial(which))
    kernels, mode = which.kernels(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # as in a new process
    compiled = [calls.of(lambda kernel=kernel: kernel.run(*kernel.arguments)) for kernel in kernels]
    torch.use_deterministic_algorithms(mode)
    assert [len(each) for each in compiled] == [1, 1] and set.union(*compiled) == needed


def test_a_layer_that_is_built_has_its_kernels_compiled(package, on_hopper, monkeypatch, tmp_path):
    class Attention(DotProductAttention):
        """As Megatron's: its config comes first."""

        def __init__(self, dtype, **options):
            self.config = SimpleNamespace(params_dtype=dtype)
            super().__init__(8, 64, num_gqa_groups=4, tp_size=2, **options)

    kernel_files.keep(monkeypatch, tmp_path)
    DotProductAttention(8, 64)  # of no dtype
    Attention(torch.float32)
    Attention(torch.bfloat16, attn_mask_type="no_mask")
    Attention(torch.bfloat16, attention_dropout=0.1)
    Attention(torch.bfloat16, window_size=(64, 0))
    assert not list(tmp_path.iterdir())
    Attention(torch.bfloat16)
    kernels = flash4._Heads(torch.bfloat16, 4, 2, 64, is_causal=True, is_packed=False).kernels()
    assert kernel_files.started(hopper.FLASH_ATTENTION, kernels) == kernels


def test_fine_tuning_on_packed_rows_has_their_kernels_compiled(
    package, on_hopper, monkeypatch, tmp_path
):
    from megatron.core.transformer import TransformerConfig

    from mindspeed_llm.training.model import _prepare_packed_attention

    sizes = {"num_layers": 1, "hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4}
    options = {"tensor_model_parallel_size": 2, "bf16": True, "params_dtype": torch.bfloat16}
    plain = TransformerConfig(**sizes, **options, attention_dropout=0.0)
    kernel_files.keep(monkeypatch, tmp_path)
    _prepare_packed_attention(TransformerConfig(**sizes, **options, attention_dropout=0.1))
    _prepare_packed_attention(replace(plain, window_size=(64, 0)))
    assert not list(tmp_path.iterdir())
    _prepare_packed_attention(plain)
    kernels = flash4._Heads(torch.bfloat16, 4, 2, 64, is_causal=True, is_packed=True).kernels()
    assert kernel_files.started(hopper.FLASH_ATTENTION, kernels) == kernels
