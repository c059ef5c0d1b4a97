"""GEMMs in slices: the collective of one slice overlaps with the GEMM of the next.

Results are written into the caller's buffers. m rows over w ranks, cut in p slices: where rows are
scattered, slice i has the i-th part of every rank's rows, so that they are received in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.distributed.collectives import Group, resolve_group
from mindspeed.ops.dispatch import refuse_gradient


@dataclass(frozen=True)
class CocOps:
    """The overlapped GEMMs of one process group, in a number of slices."""

    group: Group = None
    slices: int = 4
    """More slices overlap more communication with smaller GEMMs; 1 where rows do not divide."""

    def on(self, group: Group, slices: int | None = None) -> CocOps:
        """Return the same operators for another process group, given as a group or its name."""
        return replace(self, group=group, slices=self.slices if slices is None else slices)

    def pure_matmul(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Write a (m, k) @ b (k, n) + bias to out (m, n)."""
        _check(a, b, out, bias, len(a))
        with torch.no_grad():
            _matmul(a, b, out)
            _add_bias(out, bias)

    def matmul_all_reduce(
        self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """Write the sum over ranks of a (m, k) @ b (k, n), plus bias, to out (m, n)."""
        _check(a, b, out, bias, len(a))
        group = resolve_group(self.group)
        with torch.no_grad():
            parts = self._parts(len(a))
            result = out if out.is_contiguous() else torch.empty_like(out).contiguous()
            pending = []
            for rows, part in zip(a.chunk(parts), result.chunk(parts), strict=True):
                _matmul(rows, b, part)
                pending.append(dist.all_reduce(part, group=group, async_op=True))
            for work in pending:
                work.wait()
            if result is not out:
                out.copy_(result)
            _add_bias(out, bias)

    def matmul_reduce_scatter(
        self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """Write this rank's rows of the sum of a (m, k) @ b (k, n), plus bias: (m / w, n)."""
        group = resolve_group(self.group)
        ranks = group.size()
        _check(a, b, out, bias, _rows_per_rank(len(a), ranks))
        with torch.no_grad():
            parts = self._parts(len(out))
            sliced = a.view(ranks, parts, -1, a.shape[1])
            received = a.new_empty(parts, len(out) // parts, b.shape[1])
            pending, kept = [], []
            for part in range(parts):
                kept.append(sliced[:, part].flatten(0, 1) @ b)  # alive until it has been sent
                work = dist.reduce_scatter_tensor(
                    received[part], kept[-1], group=group, async_op=True
                )
                pending.append(work)
            for work in pending:
                work.wait()
            out.copy_(received.flatten(0, 1))
            _add_bias(out, bias)

    def all_gather_matmul(
        self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> None:
        """Write the rows of all ranks' a (m / w, k) @ b (k, n), plus bias, to out (m, n)."""
        comm_out = a.new_empty(len(out), a.shape[1])
        self.all_gather_matmul_v2(a, b, out, comm_out, bias)

    def all_gather_matmul_v2(
        self, a: Tensor, b: Tensor, out: Tensor, comm_out: Tensor, bias: Tensor | None = None
    ) -> None:
        """As all_gather_matmul, and write the rows of all ranks to comm_out (m, k)."""
        group = resolve_group(self.group)
        ranks = group.size()
        _check(a, b, out, bias, len(a) * ranks)
        if comm_out.shape != (len(a) * ranks, a.shape[1]):
            raise ValueError(
                f"comm_out must be {(len(a) * ranks, a.shape[1])}, got {tuple(comm_out.shape)}"
            )
        with torch.no_grad():
            parts = self._parts(len(a))
            gathered = a.new_empty(parts, ranks * len(a) // parts, a.shape[1])
            pending = [
                dist.all_gather_into_tensor(buffer, rows.contiguous(), group=group, async_op=True)
                for rows, buffer in zip(a.chunk(parts), gathered, strict=True)
            ]
            by_slice = out.view(ranks, parts, -1, out.shape[1])
            kept = comm_out.view(ranks, parts, -1, a.shape[1])
            for part, work in enumerate(pending):
                work.wait()
                rows = gathered[part]
                by_slice[:, part] = (rows @ b).view(ranks, -1, out.shape[1])
                kept[:, part] = rows.view(ranks, -1, a.shape[1])
            _add_bias(out, bias)

    def all_gather_matmul_reduce_scatter(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        scatter_group: Group,
        bias: Tensor | None = None,
    ) -> None:
        """All-gather a (m / w, k) over this group, multiply, reduce-scatter over another.

        out is (m / v, n) for the v ranks of scatter_group.
        """
        rows = len(a) * resolve_group(self.group).size()
        result = a.new_empty(rows, b.shape[1])
        comm_out = a.new_empty(rows, a.shape[1])
        self.all_gather_matmul_v2(a, b, result, comm_out)
        other = resolve_group(scatter_group)
        _check(comm_out, b, out, bias, _rows_per_rank(rows, other.size()))
        with torch.no_grad():
            dist.reduce_scatter_tensor(out, result, group=other)
            _add_bias(out, bias)

    def _parts(self, rows: int) -> int:
        return self.slices if rows and rows % self.slices == 0 else 1


coc_ops = CocOps()


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _add_bias(out: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        out.add_(bias.reshape(1, -1))


def _rows_per_rank(rows: int, ranks: int) -> int:
    if rows % ranks:
        raise ValueError(f"{rows} rows do not divide over {ranks} ranks: pad them")
    return rows // ranks


def _check(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, rows: int) -> None:
    refuse_gradient("coc_ops", [a, b, out, bias])
    shape = (rows, b.shape[-1])
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or out.shape != shape:
        raise ValueError(
            f"coc_ops multiplies (m, k) by (k, n) into {shape}, got {tuple(a.shape)}, "
            f"{tuple(b.shape)} and out {tuple(out.shape)}"
        )
    if bias is not None and bias.numel() != shape[1]:
        raise ValueError(f"coc_ops needs a bias of (1, {shape[1]}), got {tuple(bias.shape)}")
