"""Roofline of a train step: its GEMMs and attention timed alone, the rest by memory traffic."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mindspeed.ops.fusion_attention import flash4


def roofline(shape, batch, clock):
    """Return the seconds of each part of a step of `batch` sequences, timed by `clock`."""
    tokens = batch * shape.sequence
    gemms = (count * _gemm(tokens, *sizes, clock) for *sizes, count in _gemms(shape))
    return {
        "GEMMs": sum(gemms),
        "attention": shape.layers * _attention(shape, batch, clock),
        "bytes": _bytes(shape, tokens) / _copy_bandwidth(clock),
    }


def short(work):
    """Return the seconds of one `work`, of ten in a row."""
    return _seconds(work, warm_up=3, repeats=10)


def sustained(work):
    """Return the seconds of one `work` in a long run, where clocks may have dropped."""
    count = max(10, round(0.3 / short(work)))
    return _seconds(work, warm_up=count, repeats=count)


def _gemms(shape):
    """List (in, out, count) of the linear layers; experts of a token as one dense layer."""
    kv = shape.kv_heads * shape.head_size
    return [
        (shape.hidden, shape.attention_width + 2 * kv, shape.layers),
        (shape.attention_width, shape.hidden, shape.layers),
        (shape.hidden, 2 * shape.ffn * shape.top_k, shape.layers),
        (shape.ffn * shape.top_k, shape.hidden, shape.layers),
        (shape.hidden, shape.vocabulary, 1),
    ]


def _bytes(shape, tokens):
    """Return the bytes read and written outside of GEMMs, each element once, two bytes each."""
    stream = tokens * shape.hidden
    add_and_norm = 2 * shape.layers * (4 + 4) * stream
    rotary = 2 * 2 * shape.layers * tokens * (shape.heads + shape.kv_heads) * shape.head_size
    swiglu = shape.layers * (3 + 5) * tokens * shape.ffn * shape.top_k
    cross_entropy = 2 * tokens * shape.vocabulary
    embedding = 4 * stream + shape.vocabulary * shape.hidden
    return 2 * (add_and_norm + rotary + swiglu + cross_entropy + embedding)


def _gemm(tokens, width_in, width_out, clock):
    x, weight, grad = _draw(tokens, width_in), _draw(width_out, width_in), _draw(tokens, width_out)
    return clock(lambda: (x @ weight.t(), grad @ weight, grad.t() @ x))


def _attention(shape, batch, clock):
    q, k, v = (
        _draw(batch, shape.sequence, heads, shape.head_size).transpose(1, 2).requires_grad_()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    grad = torch.randn_like(q)

    def both(attend):
        torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    ways = [_by(SDPBackend.CUDNN_ATTENTION), _by(SDPBackend.FLASH_ATTENTION)]
    if flash4.supports(q, k, v, True, 0.0):
        ways.append(lambda *x: flash4.attention(*x, shape.head_size**-0.5, True))
    return min(clock(lambda attend=attend: both(attend)) for attend in ways)


def _by(backend):
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def _copy_bandwidth(clock):
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock(lambda: target.copy_(source))


def _draw(*sizes):
    return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)


def _seconds(work, warm_up, repeats):
    for _ in range(warm_up):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats / 1e3
