"""Low-rank adapters beside the grouped linear layers of the experts of this rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed.distributed.collectives import copy_to_group
from mindspeed.parallel.tensor import grouped_linear
from mindspeed_llm.checkpoint.adapters import Factors
from mindspeed_llm.models.weight_table import TPSplit, Weight
from mindspeed_llm.training.lora_factors import Adapter, Factor, first_values
from mindspeed_llm.training.lora_plan import LoraPlan, projections


class ExpertLora(Adapter):
    """The adapters of one grouped linear layer: a factor of a projection holds all local experts.

    Each expert has factors of its own, A (rank, in) and B (out, rank), so that what is trained is
    what a linear layer for each expert would have. What A makes of the rows of all experts is one
    grouped GEMM, and so is what B makes of that.
    """

    def __init__(
        self,
        linear: Any,
        weights: Sequence[Weight],
        plan: LoraPlan,
        seed: int,
        loaded: Mapping[str, Factors] | None = None,
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self._group = parallel_state.get_expert_tensor_parallel_group()
        self._tp, self._tp_rank = self._group.size(), self._group.rank()
        self._is_row = weights[0].split is TPSplit.COLUMNS
        self._plan = plan
        self._rows = {}
        """Rows of each projection in the output of this rank."""
        self.hf_names: set[str] = set()
        for name, (rows, _) in projections(weights[0]).items():
            short = name.rpartition(".")[2]
            self._rows[short] = rows // (1 if self._is_row else self._tp)
            if short not in plan.modules:
                continue
            parts = [self._local(w, short, seed, loaded) for w in weights]
            part = nn.Module()
            like = linear.weight0
            part.lora_A, part.lora_B = (
                Factor(torch.stack(factor).to(like.device, like.dtype))
                for factor in zip(*parts, strict=True)
            )
            self._mark(part.lora_A.weight, part.lora_B.weight, like)
            self.add_module(short, part)
        linear.register_forward_hook(self._add)

    def _local(
        self, weight: Weight, short: str, seed: int, loaded: Mapping[str, Factors] | None
    ) -> Factors:
        """Return this rank's part of the first factors of one expert."""
        sizes = {
            name.rpartition(".")[2]: (name, size) for name, size in projections(weight).items()
        }
        name, size = sizes[short]
        self.hf_names.add(name)
        a, b = first_values(name, size, self._plan.r, seed, loaded)
        if self._is_row:
            return a.chunk(self._tp, 1)[self._tp_rank], b
        return a, b.chunk(self._tp, 0)[self._tp_rank]

    def _mark(self, a: Tensor, b: Tensor, like: Tensor) -> None:
        """Mark for Megatron which ranks reduce the gradients, and that it counts each once."""
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        for factor in (a, b):
            # Megatron takes what is not tensor-parallel for a copy of that of the first TP rank,
            # which has other experts where the experts' tensor parallelism is not the model's.
            set_tensor_model_parallel_attributes(factor, True, 0, 1)
            factor.allreduce = getattr(like, "allreduce", True)  # type: ignore[attr-defined]
        whole = b if self._is_row else a
        whole.shared = self._tp_rank > 0  # type: ignore[attr-defined]

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A (experts, n, in) and B (experts, out, n) of the whole layer, n ranks in all."""
        parts: dict[str, Any] = dict(self.named_children())
        scale, rank = self._plan.alpha / self._plan.r, self._plan.r
        inner = torch.cat([part.lora_A() for part in parts.values()], 1)
        outer = inner.new_zeros(len(inner), sum(self._rows.values()), inner.shape[1])
        start = column = 0
        for name, rows in self._rows.items():
            if name in parts:
                block = outer[:, start : start + rows, column : column + rank]
                block.copy_(parts[name].lora_B() * scale)
                column += rank
            start += rows
        return inner, outer

    def _add(self, linear: Any, arguments: tuple[Any, ...], output: tuple[Any, ...]) -> Any:
        """Add what the adapters make of the input to the output of the layer."""
        (x, m_splits), (out, bias) = arguments[:2], output
        if not self.is_used:
            return out, bias
        inner, outer = self.factors()
        # Each rank has a part of the gradient of the factor that is whole.
        if self._is_row:
            outer = copy_to_group(outer, self._group)
        else:
            inner = copy_to_group(inner, self._group)
        ends = torch.as_tensor(m_splits).cumsum(0, dtype=torch.int32).to(out.device)
        low = grouped_linear(x.to(out.dtype), inner.unbind(), ends)
        return out + grouped_linear(low, outer.unbind(), ends), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sharded state dict: experts first, then one factor over the ETP ranks."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing import ShardedTensor

        experts = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        copies = parallel_state.get_expert_data_parallel_rank()
        cut, axis = (".lora_A.weight", 2) if self._is_row else (".lora_B.weight", 1)
        first, sharded = len(sharded_offsets), {}
        for name, value in self.state_dict(prefix="", keep_vars=True).items():
            offsets = [*sharded_offsets, (first, *experts)]
            if is_cut := name.endswith(cut):
                offsets.append((first + axis, self._tp_rank, self._tp))
            sharded[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name,
                value,
                *offsets,
                replica_id=(0, 0 if is_cut else self._tp_rank, copies),
                prepend_axis_num=first,
            )
        return sharded
