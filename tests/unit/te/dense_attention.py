"""Attention written out in float64, inputs for it, and a comparison that covers gradients.

B batch, S sequence, N heads, G key / value heads, H head size.
"""

import torch

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
