"""Tokens to the order of their experts and back: each token once, each of its k rows once."""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.moe_token_permute import moe_token_permute
from mindspeed.ops.moe_token_unpermute import moe_token_unpermute
from mindspeed.te.pytorch.permutation import moe_permute_with_probs, moe_unpermute


def choose(tokens, choices, experts, device):
    """Draw k different experts for each token."""
    return torch.rand(tokens, experts, device=device).topk(choices, dim=-1).indices


def permute(x, experts):
    """Sort and gather as torch does."""
    return x.index_select(0, experts.reshape(-1).argsort(stable=True) // experts.shape[1])


def unpermute(rows, places, probs):
    """Gather, weigh and sum as torch does."""
    picked = rows.index_select(0, places).view(*probs.shape, -1)
    return (picked * probs.unsqueeze(-1)).sum(1).to(rows.dtype)


def permute_case(tokens, hidden, choices, experts, dtype=torch.bfloat16):
    """Race the way to the experts."""

    def make_inputs(device):
        x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        return x, choose(tokens, choices, experts, device)

    moved = Work(bytes=tokens * hidden * dtype.itemsize * (1 + choices))
    return Case(
        op="moe_token_permute",
        shape=f"{tokens}x{hidden} top {choices} of {experts}",
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


def unpermute_case(tokens, hidden, choices, experts, dtype=torch.bfloat16):
    """Race the way back, with weights."""

    def make_inputs(device):
        count = tokens * choices
        rows = torch.randn(count, hidden, device=device, dtype=dtype, requires_grad=True)
        places = moe_token_permute(rows[:tokens], choose(tokens, choices, experts, device))[1]
        probs = torch.rand(tokens, choices, device=device, requires_grad=True)
        return rows, places, probs

    token = tokens * hidden * dtype.itemsize
    work = {
        "fwd": Work(bytes=token * (1 + choices)),
        "bwd": Work(bytes=token * (1 + 2 * choices)),
    }
    return Case(
        op="moe_token_unpermute",
        shape=f"{tokens}x{hidden} top {choices} of {experts}",
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


def mask_case(tokens, hidden, choices, experts, dtype=torch.bfloat16):
    """Race the way there and back by a mask, as Megatron's dispatcher goes it."""

    def make_inputs(device):
        x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        chosen = choose(tokens, choices, experts, device)
        mask = torch.zeros(tokens, experts, dtype=torch.bool, device=device)
        probs = torch.rand(tokens, experts, device=device) * mask.scatter_(1, chosen, True)
        return x, mask, probs.requires_grad_()

    def weigh(rows, weights):
        return (rows * weights.unsqueeze(-1)).to(rows.dtype)

    def ours(x, mask, probs):
        rows, weights, where = moe_permute_with_probs(x, probs, mask, tokens * choices)
        return moe_unpermute(weigh(rows, weights), where, restore_shape=x.shape)

    there = optional("megatron.core.transformer.moe.moe_utils:permute")
    back = optional("megatron.core.transformer.moe.moe_utils:unpermute")

    def megatron(x, mask, probs):
        rows, weights, where = there(x, mask, probs=probs, num_out_tokens=tokens * choices)[:3]
        return back(weigh(rows, weights), where, x.shape)

    # Rows are written, weighted (read and written) and read; backward reads them once more.
    token = tokens * hidden * dtype.itemsize
    forward, backward = Work(bytes=token * (2 + 4 * choices)), Work(bytes=token * (2 + 5 * choices))
    return Case(
        op="moe_permute_by_mask",
        shape=f"{tokens}x{hidden} top {choices} of {experts}",
        dtype=dtype,
        make_inputs=make_inputs,
        peers={"ours": ours, "megatron": there and megatron},
        reference=lambda x, mask, probs: x * (probs * mask).sum(-1, keepdim=True),
        work={"fwd": forward, "full": forward + backward},
    )


SHAPES = [(8192, 2048, 8, 64), (8192, 7168, 8, 256), (16384, 2048, 8, 64)]
MAKERS = (permute_case, unpermute_case, mask_case)
CASES = [make(*shape) for shape in SHAPES for make in MAKERS]
TINY = [make(9, 5, 2, 4, torch.float32) for make in MAKERS]
