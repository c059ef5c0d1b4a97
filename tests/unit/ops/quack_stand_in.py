"""What the functions of quack-kernels compute, in plain torch, for machines without a Hopper GPU.

A matrix named in `concat_layout` holds [first half; second half] along its dimension that is not
contiguous, and is read or written as if both were interleaved.
"""

import importlib.metadata
import inspect
import sys
import types
from types import SimpleNamespace

import torch
from torch.nn.functional import silu

from mindspeed import device
from mindspeed.device import hopper


def woven(x):
    """Interleave the halves of a matrix."""
    dim = 0 if x.stride(1) == 1 else 1
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def apart(x):
    """Undo it, along the rows."""
    return torch.cat([x[::2], x[1::2]])


def wide(*tensors):
    """Products sum up in float32 at least, and are rounded once."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def swiglu(pairs):
    return silu(pairs[:, ::2]) * pairs[:, 1::2]


def is_within_reach(*tensors):
    """The copy engine wants its matrices at multiples of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def gemm(A, B, *, out_dtype=None, concat_layout=(), dynamic_scheduler, tuned):
    assert dynamic_scheduler and not tuned and is_within_reach(A, B)
    kind, (A, B) = out_dtype or A.dtype, wide(A, B)
    out = A @ (woven(B) if "B" in concat_layout else B)
    return (apart(out) if "out" in concat_layout else out).to(kind)


def gemm_add_inplace(A, B, out, *, concat_layout, dynamic_scheduler, tuned):
    assert dynamic_scheduler and not tuned and concat_layout == ("C", "out")
    assert is_within_reach(A, B, out)
    A, B = wide(A, B)
    out += apart(A @ B)


def gemm_gated(A, B, *, activation, concat_layout, tuned):
    assert activation == "swiglu" and not tuned and concat_layout == ("B",)
    assert is_within_reach(A, B)
    kind, (A, B) = A.dtype, wide(A, B)
    pairs = A @ woven(B)
    return pairs.to(kind), swiglu(pairs).to(kind)


def gemm_dgated(A, B, PreAct, *, activation, tuned):
    assert activation == "swiglu" and not tuned and PreAct.shape[1] == 2 * B.shape[1]
    assert is_within_reach(A, B, PreAct)
    kind, (A, B, PreAct) = A.dtype, wide(A, B, PreAct)
    with torch.enable_grad():
        pairs = PreAct.detach().requires_grad_()
        y = swiglu(pairs)
        (grad,) = torch.autograd.grad(y, pairs, A @ B)
    return grad.to(kind), y.detach().to(kind)


def install(monkeypatch):
    """Let this machine seem to have a Hopper GPU and the package."""
    names = ("quack", "quack.gemm_interface")
    package, module = (types.ModuleType(name) for name in names)
    for name, part in zip(names, (package, module)):
        part.__spec__, part.__path__ = SimpleNamespace(name=name), []
        monkeypatch.setitem(sys.modules, name, part)
    for function in (gemm, gemm_add_inplace, gemm_gated, gemm_dgated):
        setattr(module, function.__name__, function)
    versions = {"quack-kernels": "0.6.5"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(type(device.current()), "capability", lambda _: hopper.CAPABILITY)
    monkeypatch.setattr(hopper, "_is_usable", inspect.unwrap(hopper._is_usable))
