"""Low-rank adapters beside the linear layers of a Megatron model, one for each HF projection.

So what is trained here is what peft trains: a fused layer has as many adapters as it has
projections. Each layer's are a module beside it, and the names of its weights stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed.config import ConfigError
from mindspeed.ops.adapter_factors import add_factor_gradients, join_factors
from mindspeed.ops.adapter_factors.reference import FactorLayout, split_gradients
from mindspeed.ops.matmul_add_fp32.main_grad import placeholder
from mindspeed.te.pytorch.module.layernorm_linear import LayerNormLinear
from mindspeed.te.pytorch.module.linear import LinearBase
from mindspeed_llm.checkpoint.adapters import Factors, read_peft
from mindspeed_llm.checkpoint.torch_dist import ADAPTERS
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.weight_table import TPSplit, Weight
from mindspeed_llm.training.expert_lora import ExpertLora
from mindspeed_llm.training.lora_factors import Adapter, Factor, first_values
from mindspeed_llm.training.lora_plan import (
    LoraPlan,
    adaptable_weights,
    projection_names,
    projections,
)
from mindspeed_llm.training.model import set_routers_trained
from mindspeed_llm.training.options import TrainOptions


def add_adapters(
    chunks: Sequence[Any], plan: LoraPlan, shape: ModelConfig, options: TrainOptions
) -> None:
    """Freeze the weights and put adapters beside the layers that the plan names."""
    loaded = read_peft(options.lora_load) if options.lora_load else None
    weights = _by_module(shape)
    used: set[str] = set()
    for chunk in chunks:
        chunk.requires_grad_(False)
        if plan.routers:
            set_routers_trained([chunk], True)
        if shape.num_labels and chunk.post_process:
            chunk.output_layer.requires_grad_(True)
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            if number in options.noop_layers:
                continue
            number -= sum(noop < number for noop in options.noop_layers)
            for name, module in list(layer.named_modules()):
                found = weights.get(f"decoder.layers.{number}.{name}", [])
                if not found or not set(projection_names(found[0])) & set(plan.modules):
                    continue
                is_experts = found[0].expert is not None
                adapters: Adapter = (
                    ExpertLora(module, found, plan, options.seed, loaded)
                    if is_experts
                    else LoraLinear(module, found[0], plan, options.seed, loaded)
                )
                used |= adapters.hf_names
                parent, _, last = name.rpartition(".")
                layer.get_submodule(parent).add_module(last + ADAPTERS, adapters)
        if options.recompute_granularity == "full" and chunk.pre_process:
            # A recomputed layer has a gradient only where its input has one.
            chunk.embedding.register_forward_hook(lambda m, a, output: output.requires_grad_(True))
    if not used:
        raise ConfigError("this rank has no layer for adapters: use fewer pipeline stages")


def _by_module(shape: ModelConfig) -> dict[str, list[Weight]]:
    """Return the weights that adapters are made for by module, those of experts of this rank."""
    from megatron.core import parallel_state

    found: dict[str, list[Weight]] = {}
    for weight in adaptable_weights(shape):
        name = weight.name.removesuffix(".weight")
        if weight.expert is not None:
            name = name.replace(f".experts.{weight.expert}.", ".experts.")
        found.setdefault(name, []).append(weight)
    rank = parallel_state.get_expert_model_parallel_rank()
    count = parallel_state.get_expert_model_parallel_world_size()
    for name, weights in found.items():
        if weights[0].expert is not None:
            local = len(weights) // count
            found[name] = weights[rank * local : (rank + 1) * local]
    return found


def adapters_of(chunks: Sequence[Any]) -> list[Adapter]:
    """Return the adapters of models."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, Adapter)]


@contextmanager
def without_adapters(chunks: Sequence[Any]) -> Iterator[None]:
    """Run models as they are without their adapters."""
    found = adapters_of(chunks)
    for adapters in found:
        adapters.is_used = False
    try:
        yield
    finally:
        for adapters in found:
            adapters.is_used = True


class LoraLinear(Adapter):
    """The adapters of one linear layer.

    They take part in its GEMM where the layer lets them; with dropout, which the GEMM's own
    input does not get, and beside Megatron's local layers they add to its output.
    """

    def __init__(
        self,
        linear: Any,
        weight: Weight,
        plan: LoraPlan,
        seed: int,
        loaded: Mapping[str, Factors] | None = None,
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self._tp = parallel_state.get_tensor_model_parallel_world_size()
        self._rank = parallel_state.get_tensor_model_parallel_rank()
        self._is_row = weight.split is TPSplit.COLUMNS
        self.sequence_parallel = bool(getattr(linear, "sequence_parallel", False)) and self._tp > 1
        """Whether ranks share sequences beside the layer; off while tokens are decoded."""
        self._is_inside = isinstance(linear, LinearBase) and not plan.dropout
        self._plan = plan
        self._sizes = projections(weight)
        self.hf_names = {n for n in self._sizes if n.rpartition(".")[2] in plan.modules}
        for name in (name for name in self._sizes if name in self.hf_names):
            factors = first_values(name, self._sizes[name], plan.r, seed, loaded)
            # Layers of their own, since a gather of weights that overlaps ends as a layer begins.
            part = nn.Module()
            part.lora_A, part.lora_B = map(Factor, self._local(factors, linear))
            self._mark(part.lora_A.weight, part.lora_B.weight)
            self.add_module(name.rpartition(".")[2], part)
        self._layout = self._plan_layout(_local_order(weight, self._sizes, self._tp), linear)
        self._fused = bool(getattr(linear, "fuse_wgrad_accumulation", False))
        if self._is_inside:
            linear.low_rank = self.factors
        else:
            self._add_to_output(linear)

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Return A and B of the whole layer: what is added to its weight is B A."""
        return self._join() if self.is_used else None

    def _join(self) -> tuple[Tensor, Tensor]:
        parts: list[Any] = list(self.children())
        inner = [part.lora_A() for part in parts]
        outer = [part.lora_B() for part in parts]
        factors: tuple[Tensor, Tensor] = _Join.apply(self._layout, self._fused, *inner, *outer)
        return factors

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """Add what the adapters make of x, each with its own dropout, to the output."""
        inner, outer = self._join()
        parts = [F.linear(self._dropped(x), factor) for factor in inner.split(self._plan.r)]
        low = self._exchange(torch.cat(parts, -1))
        return out + F.linear(low, outer).to(out.dtype)

    def _plan_layout(self, order: Tensor | None, linear: Any) -> FactorLayout:
        """Return where the factors of each projection are in those of the whole layer."""
        rows, start = {}, 0
        for name, (size, _) in self._sizes.items():
            stop = start + size // (1 if self._is_row else self._tp)
            rows[name.rpartition(".")[2]] = slice(start, stop)
            start = stop
        adapted = [rows[name] for name, _ in self.named_children()]
        scale = self._plan.alpha / self._plan.r
        device = next(linear.parameters()).device
        return FactorLayout(adapted, start, scale, order=order, device=device)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sharded state dict: one factor is split over the tensor-parallel ranks."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        cut, axis = (".lora_A.weight", 1) if self._is_row else (".lora_B.weight", 0)
        axes = {name: axis for name in state if name.endswith(cut)}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets
        )
        return sharded

    def _add_to_output(self, linear: Any) -> None:
        has_norm = isinstance(linear, LayerNormLinear)
        if has_norm:  # the adapters want what the GEMM gets, not what the norm does
            linear.return_layernorm_output = True

        def add(module: Any, arguments: tuple[Any, ...], output: tuple[Any, ...]) -> Any:
            x, (out, bias) = arguments[0], output[:2]
            if has_norm and isinstance(out, tuple):
                out, x = out
            elif has_norm:
                x = output[2]
            return self(x, out) if self.is_used else out, bias

        linear.register_forward_hook(add)

    def _local(self, factors: Factors, linear: Any) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the factors, as the layer's weight is kept."""
        like = next(linear.parameters())
        a, b = factors
        if self._is_row:
            a = a.chunk(self._tp, 1)[self._rank]
        else:
            b = b.chunk(self._tp, 0)[self._rank]
        return tuple(f.to(like.device, like.dtype, copy=True).contiguous() for f in (a, b))  # type: ignore[return-value]

    def _mark(self, a: Tensor, b: Tensor) -> None:
        """Mark for Megatron which factor is sharded, and which sums over parts of the sequence."""
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        cut, whole = (a, b) if self._is_row else (b, a)
        set_tensor_model_parallel_attributes(cut, True, 1 if self._is_row else 0, 1)
        # Inside the layer's GEMM the layer sums the gradients of a whole factor.
        is_partial = self.sequence_parallel and not self._is_inside
        whole.sequence_parallel = is_partial  # type: ignore[attr-defined]

    def _exchange(self, low: Tensor) -> Tensor:
        """Bring the low-rank values from how the input is shared to how the output is."""
        from megatron.core import tensor_parallel as tp

        if self._tp == 1:
            return low
        if self._is_row and self.sequence_parallel:
            return tp.reduce_scatter_to_sequence_parallel_region(low)
        if self._is_row:
            return tp.reduce_from_tensor_model_parallel_region(low)
        if self.sequence_parallel:
            return tp.gather_from_sequence_parallel_region(low)
        return tp.copy_to_tensor_model_parallel_region(low)

    def _dropped(self, x: Tensor) -> Tensor:
        if not self._plan.dropout or not self.training:
            return x
        with self._random():
            return F.dropout(x, self._plan.dropout)

    def _random(self) -> AbstractContextManager[Any]:
        """Ranks with parts of an input draw differently, ranks with copies of it alike."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        is_part = self._tp > 1 and (self._is_row or self.sequence_parallel)
        context: AbstractContextManager[Any] = get_cuda_rng_tracker().fork()
        return context if is_part else nullcontext()


class _Join(Function):
    """The factors of a layer from those of its projections: A below A, B diagonal and scaled.

    Where a layer accumulates weight gradients itself, those of the factors are added to their
    `main_grad` right away.
    """

    @staticmethod
    def forward(
        ctx: Any, layout: FactorLayout, fused: bool, *factors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.fused, ctx.factors = layout, fused, factors
        count = len(layout.rows)
        joined: tuple[Tensor, Tensor] = join_factors(factors[:count], factors[count:], layout)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, inner: Tensor, outer: Tensor) -> tuple[Tensor | None, ...]:
        layout, factors = ctx.layout, ctx.factors
        totals = [getattr(factor, "main_grad", None) for factor in factors]
        if ctx.fused and all(total is not None for total in totals):
            count = len(layout.rows)
            add_factor_gradients(inner, outer, totals[:count], totals[count:], layout)
            return None, None, *map(placeholder, factors)
        inner_grads, outer_grads = split_gradients(inner, outer, layout)
        return None, None, *inner_grads, *(grad * layout.scale for grad in outer_grads)


def _local_order(weight: Weight, sizes: Mapping[str, tuple[int, int]], tp: int) -> Tensor | None:
    """Return which row of the projections, one behind the other, each row of a rank's layer is.

    The order is the same on every rank; nothing where the rows are in that order already.
    """
    starts, start = {}, 0
    for name, (rows, _) in sizes.items():
        starts[name] = start
        start += rows // tp
    order = []
    for m in sorted(weight.slice_maps, key=lambda m: m.mcore_slice):
        name = m.hf_name.removesuffix(".weight")
        first, last = m.hf_slice[0]
        local = range(first, min(last, sizes[name][0] // tp))
        order += [starts[name] + row for row in local]
    if weight.split is TPSplit.COLUMNS or order == sorted(order):
        return None
    return torch.tensor(order)
