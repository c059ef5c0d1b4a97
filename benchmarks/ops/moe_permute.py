"""Tokens to the order of their experts and back: each token once, each of its k rows once."""

import torch
from op_case import Case, Work, compiled

from mindspeed.ops.moe_token_permute import moe_token_permute
from mindspeed.ops.moe_token_unpermute import moe_token_unpermute


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


SHAPES = [(8192, 2048, 8, 64), (8192, 7168, 8, 256), (16384, 2048, 8, 64)]
CASES = [make(*shape) for shape in SHAPES for make in (permute_case, unpermute_case)]
TINY = [make(9, 5, 2, 4, torch.float32) for make in (permute_case, unpermute_case)]
