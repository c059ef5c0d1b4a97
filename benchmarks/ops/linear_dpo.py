"""Preference optimisation (DPO) from hidden states: three products of T x H x V, a loss a pair.

The first half of the sequences is preferred to the second; the reference model is left out.
"""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.linear_cross_entropy import linear_cross_entropy

BETA = 0.1


def preference(log_probs):
    """Return the loss of the pairs from the log probability of each token."""
    chosen, rejected = log_probs.sum(-1).chunk(2)
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()


def ours(hidden, weight, labels):
    """Compute by slices of the vocabulary."""
    return preference(-linear_cross_entropy(hidden, weight, labels))


def eager(hidden, weight, labels):
    """Compute all logits and their logarithms in float32, as TRL does."""
    logits = torch.nn.functional.linear(hidden, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return preference(logits.to(wide).log_softmax(-1).gather(-1, labels[..., None])[..., 0])


def liger_peer():
    """Compute by Liger, a pair at a time."""
    loss = optional("liger_kernel.chunked_loss:LigerFusedLinearDPOLoss")
    if loss is None:
        return None
    loss = loss(beta=BETA, use_ref_model=False)
    return lambda hidden, weight, labels: loss(weight, hidden, labels)[0]


def case(pairs, tokens, hidden, vocabulary, dtype=torch.bfloat16):
    """Race one shape."""

    def inputs_of(tokens):
        def make_inputs(device):
            states = torch.randn(2 * pairs, tokens, hidden, device=device, dtype=dtype)
            weight = torch.randn(vocabulary, hidden, device=device, dtype=dtype) * hidden**-0.5
            labels = torch.randint(0, vocabulary, (2 * pairs, tokens), device=device)
            return states.requires_grad_(), weight.requires_grad_(), labels

        return make_inputs

    flops = 2 * 2 * pairs * tokens * hidden * vocabulary
    return Case(
        op="linear_dpo",
        shape=f"2x{pairs}x{tokens}x{hidden}x{vocabulary}",
        dtype=dtype,
        make_inputs=inputs_of(tokens),
        gate_inputs=inputs_of(min(tokens, 32)),  # the loss of a long pair is all or nothing
        peers={
            "ours": ours,
            "eager": eager,
            "compile": compiled(eager),
            "liger": liger_peer(),
        },
        reference=eager,
        work={"fwd": Work(flops=flops), "full": Work(flops=3 * flops)},
    )


CASES = [case(2, 2048, 4096, 128256)]
TINY = [case(1, 5, 8, 24, torch.float32)]
