"""Products of half-precision matrices by any algorithm of cuBLAS, not only the one it would take.

cuBLAS stores by columns, torch by rows: what is computed here is D^T = b^T a^T in its words.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p

import torch
from torch import Tensor

WORKSPACE = 32 * 2**20  # what torch lends cuBLAS on Hopper
ALIGNMENT = 256  # bytes; what cuBLAS counts on unless it is told of less
_MOST = 16  # algorithms

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _TRANSPOSE_A, _TRANSPOSE_B = 68, 3, 4
_MAX_WORKSPACE, _REDUCTIONS = 1, 3
_IN_FLOAT32 = 3  # ways of adding partial sums: none, in place, in the type of the computation


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Product:
    """a (M, K) @ b (K, N) -> out (M, N), or added to it, for matrices that lie as these do."""

    def __init__(self, a: Tensor, b: Tensor, out: Tensor, is_added: bool) -> None:
        self._library = _library()
        self._handle = _handle(out.device.index)
        (rows, depth), columns = a.shape, b.shape[1]
        types = _TYPES[a.dtype], _TYPES[out.dtype]
        a_turned, b_turned = a.stride(1) != 1, b.stride(1) != 1
        self._how = self._description(int(b_turned), int(a_turned))
        stored_b = (depth, columns) if b_turned else (columns, depth)
        stored_a = (rows, depth) if a_turned else (depth, rows)
        self._b = self._layout(types[0], *stored_b, b.stride(1 if b_turned else 0))
        self._a = self._layout(types[0], *stored_a, a.stride(1 if a_turned else 0))
        self._out = self._layout(types[1], columns, rows, out.stride(0))
        self._one, self._kept = byref(c_float(1.0)), byref(c_float(float(is_added)))
        self._found = (_Algorithm * _MOST)()
        self.algorithms = self._search()

    def run(self, algorithm: int, a: Tensor, b: Tensor, out: Tensor, place: tuple[int, int]) -> int:
        """Queue it; `place` is memory of WORKSPACE bytes and the stream. 0 if all is well."""
        memory, stream = place
        to = out.data_ptr()
        return int(
            self._library.cublasLtMatmul(
                *(self._handle, self._how, self._one),
                *(b.data_ptr(), self._b, a.data_ptr(), self._a),
                *(self._kept, to, self._out, to, self._out),
                *(byref(self._found[algorithm]), memory, WORKSPACE, stream),
            )
        )

    def _description(self, first: int, second: int) -> c_void_p:
        how = c_void_p()
        _check(self._library.cublasLtMatmulDescCreate(byref(how), _COMPUTE_32F, 0))
        for name, value in ((_TRANSPOSE_A, first), (_TRANSPOSE_B, second)):
            flag = c_int(value)
            _check(self._library.cublasLtMatmulDescSetAttribute(how, name, byref(flag), 4))
        return how

    def _layout(self, kind: int, rows: int, columns: int, pitch: int) -> c_void_p:
        layout = c_void_p()
        create = self._library.cublasLtMatrixLayoutCreate
        _check(create(byref(layout), kind, rows, columns, pitch))
        return layout

    def _search(self) -> int:
        """Let cuBLAS list its algorithms, the one it would take first; return how many."""
        wishes, most, ways, count = c_void_p(), c_uint64(WORKSPACE), c_int(_IN_FLOAT32), c_int()
        library = self._library
        _check(library.cublasLtMatmulPreferenceCreate(byref(wishes)))
        set_wish = library.cublasLtMatmulPreferenceSetAttribute
        _check(set_wish(wishes, _MAX_WORKSPACE, byref(most), 8))
        _check(set_wish(wishes, _REDUCTIONS, byref(ways), 4))
        _check(
            library.cublasLtMatmulAlgoGetHeuristic(
                *(self._handle, self._how, self._b, self._a, self._out, self._out),
                *(wishes, _MOST, self._found, byref(count)),
            )
        )
        _check(library.cublasLtMatmulPreferenceDestroy(wishes))
        return count.value


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the cuBLAS that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    library = ctypes.CDLL(f"libcublasLt.so.{major}")
    library.cublasLtMatrixLayoutCreate.argtypes = (c_void_p, c_int, c_uint64, c_uint64, c_int64)
    library.cublasLtMatmulDescSetAttribute.argtypes = (c_void_p, c_int, c_void_p, c_size_t)
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = (c_void_p, c_int, c_void_p, c_size_t)
    of_matmul = [c_void_p] * 16
    of_matmul[14] = c_size_t
    library.cublasLtMatmul.argtypes = of_matmul
    return library


@functools.cache
def _handle(device: int) -> c_void_p:
    """Return the handle of the current device, of which this is the number."""
    handle = c_void_p()
    _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cublasLt answered with status {status}")
