"""Mixture of experts: the router, permutation by expert and back, and the experts of one layer.

Permutation moves each token once and each of its k rows once. A layer is permute, two grouped GEMMs
around a SwiGLU, weighted unpermute.
"""

import functools

import torch
from op_case import GEMMS, Case, Work, compiled, optional, run_pass

from mindspeed.ops.gmm import gmm
from mindspeed.ops.moe_token_permute import moe_token_permute, moe_token_unpermute
from mindspeed.ops.router_topk import router_topk
from mindspeed.ops.swiglu import swiglu
from mindspeed.ops.token_rows import gather_rows
from mindspeed.te.pytorch.permutation import moe_permute_with_probs, moe_unpermute


def ours(x, gate_up, down, chosen, probs):
    """Run all experts at once; routing weights are applied where rows are shortest."""
    rows, row_ids = moe_token_permute(x, chosen)
    experts = torch.arange(len(gate_up), device=x.device)
    ends = (chosen.reshape(-1, 1) == experts).sum(0).cumsum(0)
    weights = probs.reshape(-1).scatter(0, row_ids.long(), probs.reshape(-1))
    hidden = gmm(rows, gate_up.transpose(1, 2), group_list=ends)
    hidden = swiglu(hidden, weights=weights.unsqueeze(-1))
    out = gmm(hidden, down.transpose(1, 2), group_list=ends)
    return gather_rows(out, row_ids.view(chosen.shape))


def loop(x, gate_up, down, chosen, probs):
    """Run one expert after the other."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, choice = torch.where(chosen == expert)
        gate, up = (x[token] @ gate_up[expert].t()).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].t()
        weighted = y * probs[token, choice].unsqueeze(-1)
        out = out.index_add(0, token, weighted.to(x.dtype))
    return out


def gemms_alone(x, gate_up, down, chosen, probs):
    """Run the grouped GEMMs on permuted rows, forward and backward, and nothing else."""
    ends = chosen.reshape(-1).bincount(minlength=len(gate_up)).cumsum(0)
    rows = moe_token_permute(x.detach(), chosen)[0].requires_grad_()
    middle = torch.randn_like(rows[:, :1]).expand(-1, down.shape[2]).clone()

    def both(rows, gate_up, middle, down):
        up = gmm(rows, gate_up.transpose(1, 2), group_list=ends)
        return up, gmm(middle, down.transpose(1, 2), group_list=ends)

    inputs = rows, gate_up, middle.requires_grad_(), down
    return {which: run_pass(both, inputs, which) for which in ("fwd", "bwd", "full")}


def layer_case(tokens, hidden, ffn, experts, top_k, dtype=torch.bfloat16):
    """Measure one layer."""
    liger = optional("liger_kernel.ops.fused_moe:LigerFusedMoEFunction")

    def of_size(count):
        def make_inputs(device):
            x = torch.randn(count, hidden, device=device, dtype=dtype, requires_grad=True)
            gate_up = torch.randn(experts, 2 * ffn, hidden, device=device, dtype=dtype)
            down = torch.randn(experts, hidden, ffn, device=device, dtype=dtype)
            scores = torch.rand(count, experts, device=device).topk(top_k, dim=-1)
            gate_up = (gate_up / hidden**0.5).requires_grad_()
            down = (down / ffn**0.5).requires_grad_()
            return x, gate_up, down, scores.indices, scores.values.requires_grad_()

        return make_inputs

    def liger_moe(x, gate_up, down, chosen, probs):
        return liger.apply(x, gate_up, down, chosen.int(), probs)

    rows, matrices = tokens * top_k, 3 * experts * hidden * ffn
    forward = Work(
        bytes=dtype.itemsize * (2 * tokens * hidden + matrices), flops=6 * rows * hidden * ffn
    )
    backward = forward + forward
    return Case(
        op="moe_layer",
        shape=f"{tokens}x{hidden}x{ffn} top {top_k} of {experts}",
        dtype=dtype,
        make_inputs=of_size(tokens),
        gate_inputs=of_size(min(tokens, 1024)),
        peers={"ours": ours, "loop": loop, "liger": liger and liger_moe},
        reference=loop,
        lower_bounds={GEMMS: gemms_alone},
        work={"fwd": forward, "bwd": backward, "full": forward + backward},
    )


def choose_experts(tokens, top_k, experts, device):
    """Draw k different experts for each token."""
    return torch.rand(tokens, experts, device=device).topk(top_k, dim=-1).indices


def permute(x, experts):
    """Sort and gather as torch does."""
    return x.index_select(0, experts.reshape(-1).argsort(stable=True) // experts.shape[1])


def unpermute(rows, row_ids, probs):
    """Gather, weigh and sum as torch does."""
    picked = rows.index_select(0, row_ids).view(*probs.shape, -1)
    return (picked * probs.unsqueeze(-1)).sum(1).to(rows.dtype)


def permute_case(tokens, hidden, top_k, experts, dtype=torch.bfloat16):
    """Measure the permutation."""

    def make_inputs(device):
        x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        return x, choose_experts(tokens, top_k, experts, device)

    moved = Work(bytes=tokens * hidden * dtype.itemsize * (1 + top_k))
    return Case(
        op="moe_token_permute",
        shape=f"{tokens}x{hidden} top {top_k} of {experts}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": lambda x, chosen: moe_token_permute(x, chosen)[0],
            "eager": permute,
            "compile": compiled(permute),
        },
        reference=permute,
        work={"fwd": moved, "bwd": moved, "full": moved + moved},
    )


def unpermute_case(tokens, hidden, top_k, experts, dtype=torch.bfloat16):
    """Measure the unpermutation with weights."""

    def make_inputs(device):
        count = tokens * top_k
        rows = torch.randn(count, hidden, device=device, dtype=dtype, requires_grad=True)
        row_ids = moe_token_permute(rows[:tokens], choose_experts(tokens, top_k, experts, device))[
            1
        ]
        probs = torch.rand(tokens, top_k, device=device, requires_grad=True)
        return rows, row_ids, probs

    token = tokens * hidden * dtype.itemsize
    work = {
        "fwd": Work(bytes=token * (1 + top_k)),
        "bwd": Work(bytes=token * (1 + 2 * top_k)),
    }
    return Case(
        op="moe_token_unpermute",
        shape=f"{tokens}x{hidden} top {top_k} of {experts}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={
            "ours": moe_token_unpermute,
            "eager": unpermute,
            "compile": compiled(unpermute),
        },
        reference=unpermute,
        work=work | {"full": work["fwd"] + work["bwd"]},
    )


def mask_case(tokens, hidden, top_k, experts, dtype=torch.bfloat16):
    """Measure both by a routing mask, as Megatron's dispatcher does."""

    def make_inputs(device):
        x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        chosen = choose_experts(tokens, top_k, experts, device)
        mask = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
        probs = torch.rand(tokens, experts, device=device) * mask.scatter_(1, chosen, True)
        return x, mask, probs.requires_grad_()

    def weigh(rows, weights):
        return (rows * weights.unsqueeze(-1)).to(rows.dtype)

    def ours(x, mask, probs):
        rows, weights, row_map = moe_permute_with_probs(x, probs, mask, tokens * top_k)
        return moe_unpermute(weigh(rows, weights), row_map, restore_shape=x.shape)

    megatron_permute = optional("megatron.core.transformer.moe.moe_utils:permute")
    megatron_unpermute = optional("megatron.core.transformer.moe.moe_utils:unpermute")

    def megatron(x, mask, probs):
        rows, weights, row_map = megatron_permute(
            x, mask, probs=probs, num_out_tokens=tokens * top_k
        )[:3]
        return megatron_unpermute(weigh(rows, weights), row_map, x.shape)

    # Rows are written, weighted (read and written) and read; backward reads them once more.
    token = tokens * hidden * dtype.itemsize
    forward, backward = Work(bytes=token * (2 + 4 * top_k)), Work(bytes=token * (2 + 5 * top_k))
    return Case(
        op="moe_permute_by_mask",
        shape=f"{tokens}x{hidden} top {top_k} of {experts}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={"ours": ours, "megatron": megatron_permute and megatron},
        reference=lambda x, mask, probs: x * (probs * mask).sum(-1, keepdim=True),
        work={"fwd": forward, "full": forward + backward},
    )


def route(logits, topk):
    """Route as Megatron's unfused router does: softmax of the chosen, spread over all experts."""
    values, ids = logits.topk(topk, dim=-1)
    probs = torch.zeros_like(logits).scatter(1, ids, values.softmax(-1))
    torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
    scores = logits.softmax(-1)
    torch.zeros_like(logits).int().scatter(1, scores.topk(topk, dim=-1).indices, 1).bool()
    return probs, scores


def router_case(tokens, top_k, experts):
    """Measure the choice of experts with the scores of a load-balancing loss."""

    def make_inputs(device):
        return (torch.randn(tokens, experts, device=device, requires_grad=True),)

    def ours(logits):
        out = router_topk(logits, top_k, with_scores=True)
        return out.probs, out.scores

    plain = functools.partial(route, topk=top_k)
    size = tokens * experts
    forward, backward = Work(bytes=13 * size), Work(bytes=17 * size)  # float32 but the mask
    return Case(
        op="router_topk",
        shape=f"{tokens} top {top_k} of {experts}",
        dtype=torch.float32,
        make_inputs=make_inputs,
        peers={"ours": ours, "eager": plain, "compile": compiled(plain)},
        reference=plain,
        work={"fwd": forward, "bwd": backward, "full": forward + backward},
    )


SHAPES = [(8192, 2048, 8, 64), (8192, 7168, 8, 256), (16384, 2048, 8, 64)]
MAKERS = (permute_case, unpermute_case, mask_case)
CASES = [
    layer_case(16384, 2048, 1024, 64, 8),
    *(make(*shape) for shape in SHAPES for make in MAKERS),
    router_case(16384, 8, 128),
    router_case(8192, 8, 256),
]
TINY = [
    layer_case(24, 16, 8, 4, 2, torch.float32),
    *(make(9, 5, 2, 4, torch.float32) for make in MAKERS),
    router_case(9, 2, 4),
]
