"""One call of each operator of mindspeed.ops, and a program that compiles them all.

`python -m tests.unit.ops.exported_calls NAME...` runs each eagerly and compiled, in a process
without the adaptor (its cpu device is not one that torch.compile knows), and prints the name of
each whose results are equal, on a line of its own.
"""

import importlib
import sys
import tempfile
import traceback
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

import mindspeed.ops
from mindspeed.ops.adamw.reference import AdamHyper
from mindspeed.ops.adapter_factors.reference import FactorLayout

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _random(*shape: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_(grad)


def _half(*shape: int) -> torch.Tensor:
    return _random(*shape).bfloat16()


def _small(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)


def _group() -> Any:
    if not dist.is_initialized():
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dist.group.WORLD


def _dropout_add_norm() -> Call:
    x, residual = _random(2, 3, 8, grad=True), _random(2, 3, 8, grad=True)
    weight, bias = _random(8, grad=True), _random(8, grad=True)
    return (x, residual, weight, bias, 0.0, 1e-5), {}


def _grouped_rows(ends: list[int]) -> Call:
    x, weight = _random(8, 6, grad=True), _random(3, 6, 4, grad=True)
    return (x, weight), {"group_list": torch.tensor(ends)}


def _experts(rows: int) -> Call:
    group = _group()
    return (_random(2, rows, 4, grad=True), _random(2, 4, 6, grad=True), group, 1, group, 1), {}


def _mm_all_reduce() -> Call:
    return (_random(1, 4, 6), _random(6, 8), _random(1, 4, 8), _random(8), _group()), {}


def _permute() -> Call:
    return (_random(5, 4, grad=True), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])), {}


def _unpermute() -> Call:
    return (_random(6, 4, grad=True), torch.tensor([0, 3, 1, 4, 2, 5], dtype=torch.int32)), {
        "probs": torch.rand(3, 2)
    }


def _merge() -> Call:
    rows = [_random(4, 1, 16), _random(4, 1, 16)]
    stats = [_random(1, 2, 4, 1).expand(1, 2, 4, 8).contiguous() for _ in range(2)]
    sums = [s.abs() + 1 for s in stats]
    return (rows[0], stats[0], sums[0], rows[1], stats[1] + 1, sums[1]), {}


def _adamw() -> Call:
    state = [_random(6), _random(6), _random(6), _random(6).abs(), _random(6)]
    return (*state, torch.tensor([3])), {"lr": 0.1, "weight_decay": 0.01}


def _attention() -> Call:
    query, key, value = (_random(2, 4, 8, grad=True) for _ in "qkv")
    return (query, key, value, 2, "BSH"), {"scale": 0.5}


def _coc() -> Call:
    _group()
    return (_random(8, 6), _random(6, 4), torch.empty(8, 4), _random(1, 4)), {}


def _coc_v2() -> Call:
    (a, b, out, bias), _ = _coc()
    return (a, b, out, torch.empty(8, 6), bias), {}


def _adamw_lists() -> Call:
    hyper = AdamHyper(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, step=2, ema_decay=0.9)
    lists = [[_random(3), _random(4, 2)] for _ in range(3)]
    squares, averages = ([x.abs() for x in lists[0]] for _ in range(2))
    copies = [x.bfloat16() for x in lists[0]]
    return (*lists, squares, hyper), {"averages": averages, "copies": copies}


def _factors(*sizes: int) -> tuple[list[torch.Tensor], list[torch.Tensor], FactorLayout]:
    rows = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    inner, outer = [_random(3, 6) for _ in sizes], [_random(size, 3) for size in sizes]
    return inner, outer, FactorLayout(rows, sum(sizes), 0.5)


CALLS: dict[str, Callable[[], Call]] = {
    "coc_ops.all_gather_matmul": _coc,
    "coc_ops.all_gather_matmul_v2": _coc_v2,
    "coc_ops.matmul_all_reduce": _coc,
    "coc_ops.matmul_reduce_scatter": _coc,
    "coc_ops.pure_matmul": _coc,
    "npu_all_to_all_all_gather_bmm": lambda: _experts(3),
    "npu_alltoall_allgather_bmm": lambda: _experts(3),
    "npu_apply_fused_ema_adamw": _adamw,
    "npu_bmm_reduce_scatter_all_to_all": lambda: _experts(3),
    "npu_bmm_reducescatter_alltoall": lambda: _experts(3),
    "npu_dropout_add_layer_norm": _dropout_add_norm,
    "npu_dropout_add_rms_norm": _dropout_add_norm,
    "npu_ffn": lambda: ((_random(4, 6), _random(6, 8), _random(8, 6), "relu"), {}),
    "npu_fused_moe_token_permute": _permute,
    "npu_fused_moe_token_unpermute": _unpermute,
    "npu_fusion_attention": _attention,
    "npu_fusion_attention_v2": _attention,
    "npu_gmm": lambda: _grouped_rows([3, 3, 8]),
    "npu_gmm_v2": lambda: _grouped_rows([3, 0, 5]),
    "npu_grouped_mat_mul_all_reduce": lambda: (
        ([_random(3, 6), _random(2, 6)], [_random(6, 4), _random(6, 4)], _group()),
        {},
    ),
    "npu_groupmatmul_add_fp32": lambda: (
        (_half(8, 6), _half(8, 4), torch.tensor([3, 3, 8]), torch.zeros(3, 6, 4)),
        {},
    ),
    "npu_matmul_add_fp32": lambda: ((_half(8, 6), _half(8, 5), torch.zeros(5, 6)), {}),
    "npu_mm_all_reduce_add_rms_norm": _mm_all_reduce,
    "npu_mm_all_reduce_add_rms_norm_": _mm_all_reduce,
    "npu_moe_token_permute": _permute,
    "npu_moe_token_unpermute": _unpermute,
    "npu_quant_gmm": lambda: (
        (_small(8, 6), _small(3, 6, 4), torch.rand(3, 4)),
        {"group_list": torch.tensor([3, 3, 8]), "output_dtype": torch.float16},
    ),
    "npu_quant_gmm_v2": lambda: (
        (_small(8, 6), _small(3, 6, 4), torch.rand(3, 4)),
        {"group_list": torch.tensor([3, 0, 5]), "output_dtype": torch.float16},
    ),
    "npu_ring_attention_update": _merge,
    "npu_rms_norm": lambda: ((_random(3, 8, grad=True), _random(8, grad=True)), {}),
    "npu_rotary_position_embedding": lambda: (
        (_random(3, 2, 4, 8, grad=True), _random(3, 1, 1, 8), _random(3, 1, 1, 8)),
        {"mode": 0},
    ),
    "npu_swiglu": lambda: ((_random(3, 8, grad=True),), {"dim": -1}),
    "npu_weight_quant_gmm": lambda: (
        (_random(8, 6), _small(3, 6, 4), torch.rand(3, 4), torch.zeros(3, 4)),
        {"group_list": torch.tensor([3, 3, 8])},
    ),
    "adamw:adamw": _adamw_lists,
    "adapter_factors:join_factors": lambda: (_factors(8, 4), {}),
    "adapter_factors:add_factor_gradients": lambda: (
        (_random(6, 6), _random(12, 6), *_factors(8, 4)),
        {},
    ),
    "append_matmul:append_matmul": lambda: ((_half(40, 24), _half(6, 24)), {}),
    "column_sum:column_sum": lambda: ((_random(40, 6),), {}),
    "cross_entropy:cross_entropy": lambda: (
        (_random(4, 9, grad=True), torch.tensor([0, 8, -100, 3])),
        {"smoothing": 0.1},
    ),
    "norm:layer_norm": lambda: (
        (_random(3, 8, grad=True), _random(8, grad=True), _random(8, grad=True), 1e-5),
        {},
    ),
    "linear_cross_entropy:linear_cross_entropy": lambda: (
        (_random(4, 6, grad=True), _random(9, 6, grad=True), torch.tensor([0, 8, -100, 3])),
        {},
    ),
    "norm:add_rms_norm": lambda: (
        (_random(3, 8, grad=True), _random(3, 8, grad=True) + 1, _random(8, grad=True)),
        {},
    ),
    "merge_attention:merge_attention": lambda: (
        (_random(3, 1, 2, 4), _random(1, 2, 3), _random(2, 1, 2, 4), _random(1, 2, 2)),
        {"rows": torch.tensor([2, 0])},
    ),
    "merge_attention:add_rows": lambda: (
        (_random(3, 4), _random(2, 4)),
        {"rows": torch.tensor([2, 0])},
    ),
    "partial_attention:partial_attention": lambda: (
        tuple(_random(1, 3, 2, 4) for _ in range(3)),
        {"scale": 0.5},
    ),
    "decode_attention:decode_attention": lambda: (
        (
            *(_random(2, 3, 2, 8), _random(2, 3, 8), _random(2, 3, 8)),
            (_random(5, 2, 3, 8), _random(5, 2, 3, 8)),
            torch.tensor([2, 4]),
        ),
        {"scale": 0.5, "rotary": (_random(5, 8), _random(5, 8))},
    ),
    "draw_tokens:draw_tokens": lambda: ((_random(3, 300), torch.rand(3, 1)), {}),
    "norm_rotate_qkv:norm_rotate_qkv": lambda: (
        (
            *(_random(4, 2, 3, 32, grad=True), _random(8, grad=True), _random(8, grad=True)),
            *(_random(4, 1, 1, 8), [16, 8, 8]),
        ),
        {},
    ),
    "partial_attention:partial_attention_backward": lambda: (
        (*(_random(1, 3, 2, 4) for _ in range(5)), torch.full((1, 2, 3), 3.0)),
        {"scale": 0.5},
    ),
    "rotary_position_embedding:rotate_qk": lambda: (
        (_random(4, 2, 6, 8, grad=True), _random(4, 2, 2, 8, grad=True), _random(4, 1, 1, 8)),
        {},
    ),
    "rotary_position_embedding:rotate_qkv": lambda: (
        (_random(4, 2, 3, 32, grad=True), _random(4, 1, 1, 8), [16, 8, 8]),
        {},
    ),
    "router_linear:router_linear": lambda: (
        (_half(7, 8).requires_grad_(), _half(4, 8).requires_grad_()),
        {},
    ),
    "router_topk:router_topk": lambda: (
        (_random(7, 8, grad=True), 4),
        {"num_groups": 4, "group_topk": 2, "with_scores": True},
    ),
    "row_logsumexp:row_logsumexp": lambda: ((_random(7, 8, grad=True),), {}),
    "routing_rows:routing_rows": lambda: ((_random(7, 4) > 0, 9), {}),
    "swiglu:silu_mul": lambda: ((_random(3, 8, grad=True), _random(3, 8, grad=True) - 1), {}),
    "swiglu:swiglu_gradient": lambda: ((_random(3, 4), _random(3, 8)), {}),
    "swiglu:weighted_swiglu_gradient": lambda: (
        (_random(3, 4), _random(3, 8), _random(3, 1)),
        {},
    ),
    "token_rows:gather_rows": lambda: (
        (_random(6, 4, grad=True), torch.tensor([[0, 3], [1, 4], [2, 5]]), torch.rand(3, 2)),
        {},
    ),
    "token_rows:spread_rows": lambda: (
        (_random(3, 4, grad=True), torch.tensor([[0, 3], [1, 4], [2, 5]]), 6),
        {},
    ),
}
"""Arguments of one call, by the name of an export or by package:name of another operator."""


_IN_FLIGHT = "torch.compile does not trace a collective that is left in flight"
BREAKS = {
    "coc_ops.all_gather_matmul": _IN_FLIGHT,
    "coc_ops.all_gather_matmul_v2": _IN_FLIGHT,
    "coc_ops.matmul_all_reduce": _IN_FLIGHT,
    "coc_ops.matmul_reduce_scatter": _IN_FLIGHT,
    "npu_apply_fused_ema_adamw": "the number of the step is a tensor, which is read",
    "npu_grouped_mat_mul_all_reduce": _IN_FLIGHT,
    "npu_mm_all_reduce_add_rms_norm": _IN_FLIGHT,
    "npu_mm_all_reduce_add_rms_norm_": _IN_FLIGHT,
}
"""Operators that break the graph of a compiled function, and why; all others must not."""


def find(name: str) -> Callable[..., Any]:
    """Return an export, a method of one, or another operator by its package and name."""
    package, _, inner = name.rpartition(":")
    module = importlib.import_module(f"mindspeed.ops.{package}") if package else mindspeed.ops
    operator: Callable[..., Any] = attrgetter(inner)(module)
    return operator


def results(operator: Callable[..., Any], call: Call, device: str = "cpu") -> list[torch.Tensor]:
    """Return the outputs, the gradients and, for what works in place, the arguments afterwards."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device, copy=True).requires_grad_(x.requires_grad)

    args, kwargs = tree_map_only(torch.Tensor, copy, call)
    outputs = operator(*args, **kwargs)
    tensors = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    leaves = [x for x in given if x.requires_grad]
    differentiable = [x for x in tensors if x.requires_grad]
    if leaves and differentiable:
        total = sum(x.float().sin().sum() for x in differentiable)
        tensors += torch.autograd.grad(total, leaves, allow_unused=True)
    return [x.detach() for x in (*tensors, *given) if x is not None]


def main(names: list[str]) -> None:
    """Compile and compare the operators named."""
    for name in names:
        torch._dynamo.reset()  # each is a program of its own
        try:
            compare(find(name), CALLS[name](), fullgraph=name not in BREAKS)
        except Exception:  # reported here, and by the line that is not printed
            traceback.print_exc()
        else:
            print(name)


def compare(
    operator: Callable[..., Any], call: Call, *, fullgraph: bool, device: str = "cpu"
) -> None:
    """Compare the compiled operator with itself."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=fullgraph)
    torch.testing.assert_close(results(compiled, call, device), results(operator, call, device))


if __name__ == "__main__":
    main(sys.argv[1:])
