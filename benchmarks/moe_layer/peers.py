"""One layer of experts in each stack: its leaves, tokens first, and its forward."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mindspeed.ops.expert_mlp.reference import Reference, number_rows
from mindspeed.ops.swiglu import swiglu
from mindspeed.parallel.tensor import expert_mlp as expert_mlp_module
from mindspeed.parallel.tensor import grouped_linear
from mindspeed.parallel.tensor.expert_mlp import ExpertMatrices, expert_mlp
from mindspeed.te.pytorch.permutation import moe_permute_with_probs, moe_unpermute


@dataclass
class Layer:
    """The tensors of a layer: T tokens, K of E experts."""

    x: Tensor
    chosen: Tensor
    """(T, K)"""
    probs: Tensor
    """(T, K), float32"""
    first: Tensor
    """(E, 2n, d), [gate; up]"""
    second: Tensor
    """(E, d, n)"""
    grad: Tensor

    def by_mask(self):
        """Return the routing as Megatron's router does: a mask (T, E), and weights like it."""
        mask = torch.zeros(len(self.x), len(self.first), dtype=torch.bool, device=self.x.device)
        probs = torch.zeros(mask.shape, device=self.x.device)
        return mask.scatter_(1, self.chosen, True), probs.scatter_(1, self.chosen, self.probs)


def _leaf(x):
    return x.detach().requires_grad_()


def _ours(layer, kernels=None, has_main_grad=False):
    """Build the fused path; `kernels` are the fallback's, or what it chooses."""
    mask, probs = layer.by_mask()
    x, probs, num_rows = _leaf(layer.x), _leaf(probs), layer.chosen.numel()
    linears = []
    for matrix in (layer.first, layer.second):
        weights = [_leaf(one) for one in matrix]
        if has_main_grad:
            for weight, total in zip(weights, torch.zeros_like(matrix, dtype=torch.float32)):
                weight.main_grad = total
        linears.append(ExpertMatrices(weights, has_main_grad))
    choose = expert_mlp_module.choose

    def forward():
        expert_mlp_module.choose = choose if kernels is None else lambda *_: kernels
        try:
            rows, pairs = number_rows(mask, num_rows)
            return expert_mlp(x, probs.reshape(-1).index_select(0, pairs), rows, *linears)
        finally:
            expert_mlp_module.choose = choose

    return [x, probs, *linears[0].weights, *linears[1].weights], forward


def fused(layer):
    """Build the fused path."""
    return _ours(layer)


def fused_main_grad(layer):
    """Build the fused path; weight gradients are added to float32 buffers."""
    return _ours(layer, has_main_grad=True)


def fused_fallback(layer):
    """Build the same function without the package's kernels."""
    return _ours(layer, Reference())


def apart(layer):
    """Build permute, grouped linears around a weighted SwiGLU, unpermute."""
    mask, probs = layer.by_mask()
    x, probs, num_rows = _leaf(layer.x), _leaf(probs), layer.chosen.numel()
    first, second = ([_leaf(one) for one in matrix] for matrix in (layer.first, layer.second))

    def forward():
        rows, weights, row_map = moe_permute_with_probs(x, probs, mask, num_rows)
        ends = mask.sum(0).cumsum(0, dtype=torch.int32)
        y = swiglu(grouped_linear(rows, first, ends), weights=weights.unsqueeze(-1))
        return moe_unpermute(grouped_linear(y, second, ends), row_map)

    return [x, probs, *first, *second], forward


def transformers(layer):
    """Build the experts of Qwen3-MoE with torch's grouped GEMM."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    num_experts, columns, hidden = layer.first.shape
    config = Qwen3MoeConfig(
        num_experts=num_experts, hidden_size=hidden, moe_intermediate_size=columns // 2
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = nn.Parameter(layer.first), nn.Parameter(layer.second)
    x, probs = _leaf(layer.x), _leaf(layer.probs)
    weights = [experts.gate_up_proj, experts.down_proj]
    return [x, probs, *weights], lambda: experts(x, layer.chosen, probs)


def liger(layer):
    """Build Liger's fused mixture of experts."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    leaves = [_leaf(one) for one in (layer.x, layer.probs, layer.first, layer.second)]
    x, probs, first, second = leaves
    chosen = layer.chosen.int()
    return leaves, lambda: LigerFusedMoEFunction.apply(x, first, second, chosen, probs)


class _FixedRouter(nn.Module):
    def __init__(self, probs, chosen, num_experts):
        super().__init__()
        self.top_k = chosen.shape[1]
        self._routing = probs, chosen, torch.bincount(chosen.flatten(), minlength=num_experts)

    def forward(self, x, expert_bias=None):
        return self._routing


def torchtitan(layer):
    """Build torchtitan's layer without its router."""
    from torchtitan.models.moe.moe import MoE, MoEArgs

    num_experts, columns, hidden = layer.first.shape
    arguments = MoEArgs(
        num_experts=num_experts,
        num_shared_experts=0,
        top_k=layer.chosen.shape[1],
        score_before_experts=False,
        use_grouped_mm=True,
        load_balance_coeff=None,
    )
    with torch.device(layer.x.device):
        moe = MoE(arguments, dim=hidden, hidden_dim=columns // 2).to(layer.x.dtype)
        moe.tokens_per_expert = torch.zeros(num_experts)
    x, probs = _leaf(layer.x), _leaf(layer.probs)
    moe.router = _FixedRouter(probs, layer.chosen, num_experts)
    gate, up = layer.first.chunk(2, 1)
    experts = moe.experts
    experts.w1, experts.w3 = (nn.Parameter(one.contiguous()) for one in (gate, up))
    experts.w2 = nn.Parameter(layer.second)
    leaves = [x, probs, experts.w1, experts.w2, experts.w3]
    return leaves, lambda: moe(x.unsqueeze(0)).squeeze(0)


def torchtitan_compiled(layer):
    """Build it and compile the layer as torchtitan does."""
    leaves, forward = torchtitan(layer)
    return leaves, torch.compile(forward)


def sonicmoe(layer):
    """Build SonicMoE's experts; it takes rows of gate and up in turns, and sizes in their order."""
    from sonicmoe.count_cumsum import count_cumsum
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_topk_router_metadata, _DownProjection, _UpProjection

    num_experts, columns, hidden = layer.first.shape
    (num_tokens, top_k), num_rows = layer.chosen.shape, layer.chosen.numel()
    gate_up = layer.first.view(num_experts, 2, columns // 2, hidden).transpose(1, 2)
    first, second = _leaf(gate_up.reshape(layer.first.shape)), _leaf(layer.second)
    x, probs, chosen = _leaf(layer.x), _leaf(layer.probs), layer.chosen.int()
    stream = torch.cuda.current_stream().cuda_stream
    settings = False, ActivationType.SWIGLU

    def forward():
        _, ends = count_cumsum(chosen.view(-1), num_experts, do_cumsum=True)
        bounds, *rows = TC_topk_router_metadata(chosen, ends, top_k)
        y, preact = _UpProjection.apply(
            *(x, first.permute(1, 2, 0), None, bounds, num_rows, top_k, stream, *rows),
            *(*settings, False),
        )
        return _DownProjection.apply(
            *(y, preact, second.permute(1, 2, 0), None, probs, bounds, num_tokens, top_k),
            *(stream, *rows, *settings),
        )

    return [x, probs, first, second], forward


def sonicmoe_compiled(layer):
    """Build it and compile the layer, as its own benchmark does."""
    leaves, forward = sonicmoe(layer)
    return leaves, torch.compile(forward)


PEERS = {
    "ours-apart": apart,
    "ours-fused": fused,
    "ours-fused-main-grad": fused_main_grad,
    "ours-fused-fallback": fused_fallback,
    "transformers": transformers,
    "liger": liger,
    "torchtitan": torchtitan,
    "torchtitan-compiled": torchtitan_compiled,
    "sonicmoe": sonicmoe,
    "sonicmoe-compiled": sonicmoe_compiled,
}
# SonicMoE needs another release of the packages that ours is made of: a process of its own.
DEFAULT = tuple(name for name in PEERS if "compiled" not in name and "sonicmoe" not in name)
