"""What the functions of quack-kernels compute, in plain torch, for machines without a Hopper GPU.

A matrix named in `concat_layout` holds [first half; second half] along its dimension that is not
contiguous, and is read or written as if both were interleaved.
"""

import importlib.metadata
import inspect
import sys
import types
from dataclasses import dataclass
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
    """GEMMs accumulate in float32 at least, and are rounded once."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def swiglu(pairs):
    return silu(pairs[:, ::2]) * pairs[:, 1::2]


def is_within_reach(*tensors):
    """The copy engine wants its matrices at multiples of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 for x in tensors)


@dataclass(frozen=True)
class GemmConfig:
    """A choice of kernel: no value depends on it."""

    tile_m: int = 128
    tile_n: int = 192
    pingpong: bool = True
    is_dynamic_persistent: bool = True
    cluster_m: int = 2
    cluster_n: int = 1


class gemm_tuned:
    """The GEMM behind all others; `fn` takes the kernel by name."""

    @staticmethod
    def fn(A, B, out, *, config, concat_layout, add_to_output=False):
        assert isinstance(config, GemmConfig) and is_within_reach(A, B, out)
        assert A.shape[0] == out.shape[0] and B.shape[1] == out.shape[1]
        A, B = wide(A, B)
        found = A @ (woven(B) if "B" in concat_layout else B)
        found = apart(found) if "out" in concat_layout else found
        out.copy_(out + found if add_to_output else found)


def gemm_gated(A, B, *, activation, concat_layout, tuned):
    assert activation == "swiglu" and not tuned and concat_layout == ("B",)
    assert is_within_reach(A, B)
    kind, (A, B) = A.dtype, wide(A, B)
    pairs = A @ woven(B)
    return pairs.to(kind), swiglu(pairs).to(kind)


def gemm_dgated(A, B, PreAct, *, activation, tuned, config):
    assert activation == "swiglu" and not tuned and isinstance(config, GemmConfig)
    assert PreAct.shape[1] == 2 * B.shape[1]
    assert is_within_reach(A, B, PreAct)
    kind, (A, B, PreAct) = A.dtype, wide(A, B, PreAct)
    with torch.enable_grad():
        pairs = PreAct.detach().requires_grad_()
        y = swiglu(pairs)
        (grad,) = torch.autograd.grad(y, pairs, A @ B)
    return grad.to(kind), y.detach().to(kind)


def install(monkeypatch):
    """Let this machine seem to have a Hopper GPU and the package."""
    exports = {
        "quack": (),
        "quack.gemm_config": (GemmConfig,),
        "quack.gemm_interface": (gemm_tuned, gemm_gated, gemm_dgated),
    }
    for name, parts in exports.items():
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = SimpleNamespace(name=name), []
        vars(module).update({part.__name__: part for part in parts})
        monkeypatch.setitem(sys.modules, name, module)
    versions = {"quack-kernels": "0.6.5"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(type(device.current()), "capability", lambda _: hopper.CAPABILITY)
    monkeypatch.setattr(hopper, "_is_usable", inspect.unwrap(hopper._is_usable))
