"""What the functions of quack-kernels compute, in plain torch, for machines without a Hopper GPU.

A matrix named in `concat_layout` holds [first half; second half] along its dimension that is not
contiguous, and is read or written as if both were interleaved. `cu_seqlens_m` are groups of rows of
A, each with a matrix of B; `cu_seqlens_k` groups of the summed dimension, each with a matrix of the
output. `A_idx` gathers the rows of A, or its columns in the latter case. What the package demands
of dtypes, strides and addresses is asserted.
"""

import inspect
import itertools
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.nn.functional import silu

from mindspeed import device
from mindspeed.device import hopper
from tests.unit.ops import kernel_files


def woven(x):
    """Interleave the halves of a matrix, or of each of several."""
    dim = -2 if x.stride(-1) == 1 else -1
    dim += x.ndim
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


def bounds(cu_seqlens, num_rows, index):
    """Return the groups; these vectors are read in pieces of 16 bytes."""
    for vector in (cu_seqlens, index):
        if vector is not None:
            assert vector.dtype == torch.int32 and vector.is_contiguous() and vector.ndim == 1
            assert is_within_reach(vector)
    ends = cu_seqlens.tolist()
    assert ends[0] == 0 and ends == sorted(ends) and ends[-1] == num_rows
    return list(itertools.pairwise(ends))


def check_config(config, index):
    assert isinstance(config, GemmConfig)
    if index is not None:  # what kernels that gather do not have
        assert config.cluster_n == 1 and not config.is_dynamic_persistent


def multiply(A, B, *, cu_seqlens_m, A_idx, concat_layout=()):
    """Return A B in float32 at least; for groups of rows B is one matrix for each."""
    if cu_seqlens_m is None:
        assert A_idx is None and is_within_reach(A, B)
        A, B = wide(A, B)
        return A @ (woven(B) if "B" in concat_layout else B)
    groups = bounds(cu_seqlens_m, len(A) if A_idx is None else len(A_idx), A_idx)
    assert A.stride(1) == 1 and len(B) == len(groups) and B.ndim == 3 and is_within_reach(A, B)
    A, B = wide(A if A_idx is None else A[A_idx.long()], B)
    B = woven(B) if "B" in concat_layout else B
    return torch.cat([A[start:end] @ one for (start, end), one in zip(groups, B, strict=True)])


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
    def fn(
        A,
        B,
        out,
        *,
        config,
        concat_layout=None,
        add_to_output=False,
        cu_seqlens_m=None,
        cu_seqlens_k=None,
        A_idx=None,
    ):
        check_config(config, A_idx)
        concat_layout = concat_layout or ()
        assert is_within_reach(out)
        if cu_seqlens_k is None:
            assert A_idx is None or cu_seqlens_m is not None
            assert not (add_to_output and cu_seqlens_m is not None)
            found = multiply(
                *(A, B), cu_seqlens_m=cu_seqlens_m, A_idx=A_idx, concat_layout=concat_layout
            )
            found = apart(found) if "out" in concat_layout else found
        else:
            found = multiply_by_column_group(A, B, cu_seqlens_k, A_idx)
            if "out" in concat_layout:
                # Columns, for an output whose rows are contiguous, are no different from rows.
                is_transposed = out.stride(-1) != 1
                found = found.mT if is_transposed else found
                found = torch.stack([apart(one) for one in found])
                found = found.mT if is_transposed else found
        assert out.shape == found.shape
        out.copy_(out + found if add_to_output else found)


def multiply_by_column_group(A, B, cu_seqlens_k, A_idx):
    groups = bounds(cu_seqlens_k, len(B), A_idx)
    assert A.stride(0) == 1 and B.stride(1) == 1 and is_within_reach(A, B)
    A, B = wide(A if A_idx is None else A[:, A_idx.long()], B)
    return torch.stack([A[:, start:end] @ B[start:end] for start, end in groups])


def gemm_gated(
    A,
    B,
    *,
    activation,
    concat_layout,
    tuned,
    config=None,
    cu_seqlens_m=None,
    A_idx=None,
    dynamic_scheduler=False,
    store_preact=True,
):
    assert activation == "swiglu" and not tuned and concat_layout == ("B",)
    if config is not None:
        check_config(config, A_idx)
        assert not (dynamic_scheduler and A_idx is not None)
    pairs = multiply(A, B, cu_seqlens_m=cu_seqlens_m, A_idx=A_idx, concat_layout=concat_layout)
    return pairs.to(A.dtype) if store_preact else None, swiglu(pairs).to(A.dtype)


def gemm_dgated(
    A,
    B,
    PreAct,
    *,
    activation,
    tuned,
    config,
    colvec_scale=None,
    colvec_reduce=False,
    cu_seqlens_m=None,
    A_idx=None,
    dynamic_scheduler=True,
):
    assert activation == "swiglu" and not tuned
    check_config(config, A_idx)
    assert not (dynamic_scheduler and A_idx is not None)
    assert PreAct.shape[1] == 2 * B.shape[-1] and is_within_reach(PreAct)
    acc = multiply(A, B, cu_seqlens_m=cu_seqlens_m, A_idx=A_idx)
    (pairs,) = wide(PreAct)
    scale = torch.ones(len(acc), 1)
    if colvec_scale is not None:
        assert colvec_scale.shape == (len(acc),) and is_within_reach(colvec_scale)
        scale = colvec_scale.unsqueeze(1)
    with torch.enable_grad():
        pairs = pairs.detach().requires_grad_()
        y = swiglu(pairs)
        (grad,) = torch.autograd.grad(y, pairs, acc * scale)
    results = grad.to(A.dtype), (y * scale).detach().to(A.dtype)
    return (*results, (acc * y.detach()).sum(1)) if colvec_reduce else results


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
    kernel_files.install(monkeypatch, {"quack-kernels": "0.6.5"})
    monkeypatch.setattr(type(device.current()), "capability", lambda _: hopper.CAPABILITY)
    monkeypatch.setattr(hopper, "_is_usable", inspect.unwrap(hopper._is_usable))
    monkeypatch.setattr(hopper, "kernel_cache", lambda: None)  # there are no kernels to keep
