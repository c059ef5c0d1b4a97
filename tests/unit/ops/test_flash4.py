"""How flash-attn-4 is called and when; its kernels are stood in for by plain torch."""

import importlib.metadata
import logging
import sys
import types
from types import SimpleNamespace

import pytest
import torch
import torch.utils.flop_counter
from torch.nn.functional import scaled_dot_product_attention

from mindspeed import device
from mindspeed.device import hopper
from mindspeed.ops.fusion_attention import flash4


def scores(q, k, scale, causal):
    """Return (B, N, S, S) weights of (B, S, N, H) queries and keys, and the log of their sums."""
    q, k = (x.transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    found = q @ k.transpose(-1, -2) * scale
    if causal:
        found = found.masked_fill(torch.ones(found.shape[-2:]).triu(1).bool(), float("-inf"))
    return found.softmax(-1), found.logsumexp(-1)


def forward(q, k, v, *, softmax_scale, causal, return_lse, out):
    weights, lse = scores(q, k, softmax_scale, causal)
    values = v.transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1)
    out.copy_((weights @ values).transpose(1, 2))
    return out, lse, None, None, None


def backward(q, k, v, out, dout, lse, softmax_scale, causal, deterministic):
    """Use what forward kept, as the kernel does, and sum over the queries of a group."""
    weights, again = scores(q, k, softmax_scale, causal)
    torch.testing.assert_close(lse, again)
    groups = q.shape[2] // k.shape[2]
    heads = [x.transpose(1, 2) for x in (q, k, v, out, dout)]
    q, k, v, out, dout = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in heads)
    slopes = dout @ v.transpose(-1, -2) - (out * dout).sum(-1, keepdim=True)
    slopes = weights * slopes * softmax_scale
    dk, dv = slopes.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dout
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    return [x.transpose(1, 2) for x in (slopes @ k, dk, dv)]


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
    versions = {"flash-attn-4": version}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: SimpleNamespace(capability=lambda: (9, 0)))
    hopper._is_usable.cache_clear()
    yield
    hopper._is_usable.cache_clear()


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


def test_where_it_serves(package, on_hopper):
    with torch.device("meta"):
        q, k = torch.empty(1, 4, 2048, 128), torch.empty(1, 2, 2048, 128)
    assert flash4.serves(q, k, k, True, 0.0)
    assert not flash4.serves(q, k, k, True, 0.1)
    assert not flash4.serves(q[..., :96], k[..., :96], k[..., :96], True, 0.0)
    assert not flash4.serves(q, k, k[..., :64], True, 0.0)
    assert not flash4.serves(q[:, :, :2047], k, k, False, 0.0)
    assert not flash4.serves(q.mT.contiguous().mT, k, k, True, 0.0)
    assert flash4.serves(q, k[:, :, :99], k[:, :, :99], False, 0.0)
    assert not flash4.serves(q, k[:, :, :99], k[:, :, :99], True, 0.0)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not flash4.serves(q, k, k, True, 0.0)


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


def test_one_that_does_not_load_is_told_of(on_disk, monkeypatch, caplog):
    install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert not hopper.FLASH_ATTENTION.is_here()
    assert "flash-attn-4 is installed and cannot be used: the compiler has no such" in caplog.text


def test_one_that_is_too_old_is_told_of(package, monkeypatch, on_hopper, caplog):
    install(monkeypatch, "4.0.0b4")
    with caplog.at_level(logging.WARNING):
        assert not hopper.FLASH_ATTENTION.is_here()
    assert "4.0.0b4 is older than 4.0.0b36" in caplog.text
