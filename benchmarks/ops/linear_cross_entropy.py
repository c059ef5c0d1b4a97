"""Output layer and cross entropy: three products of T x H x V; the logits need not exist.

The second operator adds the weight's gradient to a float32 main_grad, as Megatron trains.
"""

import functools

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.linear_cross_entropy import linear_cross_entropy


def eager(hidden, weight, labels):
    """Compute all logits, then the mean loss in float32."""
    logits = torch.nn.functional.linear(hidden, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(logits.to(wide), labels)


def ours(hidden, weight, labels):
    """Compute by slices of the vocabulary."""
    return linear_cross_entropy(hidden, weight, labels).mean()


def ours_into_main_grad(hidden, weight, labels):
    """Compute by slices of the vocabulary, and add to main_grad."""
    weight.main_grad = _main_grad(weight.shape, weight.device)
    return linear_cross_entropy(hidden, weight, labels, fused=True).mean()


def without_weight_gradient(hidden, weight, labels):
    """Compute what the variant with main_grad returns to autograd."""
    return eager(hidden, weight.detach(), labels)


@functools.lru_cache(maxsize=1)
def _main_grad(shape, device):
    return torch.zeros(shape, device=device)


def case(tokens, hidden, vocabulary, dtype=torch.bfloat16, into_main_grad=False):
    """Race one shape."""
    liger = optional("liger_kernel.transformers.functional:liger_fused_linear_cross_entropy")

    def inputs_of(tokens):
        def make_inputs(device):
            states = torch.randn(tokens, hidden, device=device, dtype=dtype)
            weight = torch.randn(vocabulary, hidden, device=device, dtype=dtype)
            weight *= hidden**-0.5
            labels = torch.randint(0, vocabulary, (tokens,), device=device)
            return states.requires_grad_(), weight.requires_grad_(), labels

        return make_inputs

    peers = {
        "ours": ours,
        "eager": eager,
        "compile": compiled(eager),
        "liger": liger and (lambda states, weight, labels: liger(states, weight, labels)),
    }
    flops = 2 * tokens * hidden * vocabulary
    return Case(
        op="linear_cross_entropy_main_grad" if into_main_grad else "linear_cross_entropy",
        shape=f"{tokens}x{hidden}x{vocabulary}",
        dtype=dtype,
        make_inputs=inputs_of(tokens),
        gate_inputs=inputs_of(min(tokens, 256)),
        peers={"ours": ours_into_main_grad} if into_main_grad else peers,
        reference=without_weight_gradient if into_main_grad else eager,
        work={"fwd": Work(flops=flops), "full": Work(flops=3 * flops)},
    )


CASES = [
    case(8192, 1536, 151936),
    case(8192, 4096, 151936),
    case(8192, 4096, 128256),
    case(8192, 1536, 151936, into_main_grad=True),
    case(8192, 4096, 151936, into_main_grad=True),
]
TINY = [
    case(5, 8, 24, torch.float32),
    case(5, 8, 24, torch.float32, into_main_grad=True),
]
