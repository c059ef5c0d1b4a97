"""One layer of experts of Megatron under a parallel layout, and the same layer as a loop.

T tokens on each of R ranks, E experts, H and F columns. The loop knows neither ranks nor
dispatchers: it runs the tokens of all ranks through one expert after the other.
"""

from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

EXPERTS, HIDDEN, FFN, SHARED, TOKENS = 4, 8, 12, 10, 6
LR = 0.05


@dataclass(frozen=True)
class Case:
    """A layout and how tokens travel; the defaults are Megatron's own all-to-all on one rank."""

    tp: int = 1
    ep: int = 1
    extend: bool = False
    dispatcher: str = "alltoall"
    is_async: bool = True
    bmm: bool = False
    capacity: float | None = None
    pad: bool = False
    shared: bool = False
    overlap: bool = False
    topk: int = 2
    fused: bool = False
    recompute_scale: float | None = None
    one_path: bool = False

    def __str__(self):
        """Name the case by what is not the default."""
        changed = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return (
            " ".join(f"{k}={v}" for k, (v, default) in changed.items() if v != default) or "plain"
        )

    def features(self):
        """Return the options of ours."""
        options = {"moe_permutation_async_comm": self.is_async and not self.bmm}
        options |= {"moe_tp_extend_ep": self.extend, "moe_bmm_mc2": self.bmm}
        options["moe_fused_experts"] = self.one_path
        if self.recompute_scale is not None:
            options["moe_adaptive_recompute_activation"] = True
            options["moe_adaptive_recompute_activation_scale"] = self.recompute_scale
        return {name: value for name, value in options.items() if value}


def weights(dtype) -> dict[str, Tensor]:
    """Return the whole weights, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "fc1": (EXPERTS, 2 * FFN, HIDDEN),
        "fc2": (EXPERTS, HIDDEN, FFN),
        "shared1": (2 * SHARED, HIDDEN),
        "shared2": (HIDDEN, SHARED),
    }
    make = {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}
    return {name: value.to(dtype) for name, value in make.items()}


def tokens(ranks: int, dtype, seed: int = 11) -> tuple[Tensor, Tensor]:
    """Return the tokens (R, T, H) of all ranks, and what weighs the outputs in the loss."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(ranks, TOKENS, HIDDEN, generator=generator).to(dtype) for _ in "xg")


def mlp(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """A gated MLP."""
    gate, up = (x @ fc1.T).chunk(2, -1)
    return (F.silu(gate) * up) @ fc2.T


def loop(x: Tensor, probs: Tensor, mask: Tensor, parts: dict[str, Tensor], shared: bool) -> Tensor:
    """Add up the experts of each token (N, H), one expert after the other."""
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        chosen = mask[:, expert].nonzero()[:, 0]
        y = mlp(x[chosen], parts["fc1"][expert], parts["fc2"][expert])
        out = out.index_add(0, chosen, y * probs[chosen, expert, None])
    return out + mlp(x, parts["shared1"], parts["shared2"]) if shared else out


def kept(probs: Tensor, mask: Tensor, capacity: int) -> Tensor:
    """Return the mask without all but the `capacity` most probable tokens of each expert."""
    mask = mask.clone()
    for expert in range(EXPERTS):
        chosen = mask[:, expert].nonzero()[:, 0]
        order = probs[chosen, expert].argsort(descending=True)
        mask[chosen[order[capacity:]], expert] = False
    return mask


def build(case: Case, dtype, **options):
    """Make the groups and Megatron's layer with its slices of the whole weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    import mindspeed

    mindspeed.enable(**case.features())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(case.tp, expert_model_parallel_size=case.ep)
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=case.tp,
        expert_model_parallel_size=case.ep,
        sequence_parallel=case.tp > 1,
        num_moe_experts=EXPERTS,
        moe_router_topk=case.topk,
        moe_router_pre_softmax=case.topk == 1,
        moe_ffn_hidden_size=FFN,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type=case.dispatcher,
        moe_expert_capacity_factor=case.capacity,
        moe_pad_expert_input_to_capacity=case.pad,
        moe_permute_fusion=case.fused,
        moe_shared_expert_intermediate_size=SHARED if case.shared else None,
        moe_shared_expert_overlap=case.overlap,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        params_dtype=dtype,
        **{"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, **options},
    )
    spec = get_moe_module_spec(use_te=True, num_experts=EXPERTS, moe_grouped_gemm=True)
    # Megatron 0.19 has a function with arguments in place of a spec.
    submodules = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    layer = MoELayer(config, submodules)
    whole = weights(dtype)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(part(name, whole, layer))
    return layer


def part(name: str, whole: dict[str, Tensor], layer) -> Tensor:
    """Return the slice of the whole weights, or gradients, that a parameter of the layer holds."""
    from megatron.core import parallel_state as state

    if name.startswith("router"):
        return whole["router"]
    if name.startswith("shared"):
        rank, size = state.get_tensor_model_parallel_rank(), layer.config.tensor_model_parallel_size
        first, second = whole["shared1"], whole["shared2"]
    else:
        rank, size = (
            state.get_expert_tensor_parallel_rank(),
            layer.config.expert_tensor_parallel_size,
        )
        expert = layer.local_expert_indices[int(name[-1])]
        first, second = whole["fc1"][expert], whole["fc2"][expert]
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in first.chunk(2)])
    return second.chunk(size, 1)[rank]


def reduce_gradients(layer) -> None:
    """Add up the gradients of what every rank holds, as data parallelism does."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    replicas = state.get_data_parallel_group(with_context_parallel=True)
    for name, parameter in layer.named_parameters():
        if name.startswith("router"):
            dist.all_reduce(parameter.grad)
        elif name.startswith("shared"):
            dist.all_reduce(parameter.grad, group=replicas)
        else:
            dist.all_reduce(parameter.grad, group=state.get_expert_data_parallel_group())
