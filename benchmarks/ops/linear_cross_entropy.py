"""Output layer and cross entropy, and preference optimisation (DPO) on top of it.

Three GEMMs of T x H x V; the logits need not exist. The variant with main_grad adds the weight's
gradient to a float32 buffer, as Megatron trains. DPO: the first half of the sequences is preferred
to the second; the reference model is left out.
"""

import functools

import torch
from op_case import GEMMS, Case, Work, compiled, optional
from torch.utils.checkpoint import checkpoint

from mindspeed.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed.ops.linear_cross_entropy.reference import MEMORY
from mindspeed.ops.linear_cross_entropy.triton_impl import plan_for
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32

CHUNK = 2048  # tokens
BETA = 0.1


def eager(hidden, weight, labels, reduction="mean"):
    """Compute all logits, then the mean loss in float32."""
    logits = torch.nn.functional.linear(hidden, weight)
    acc_dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(logits.to(acc_dtype), labels, reduction=reduction)


def chunked(hidden, weight, labels):
    """Compute the logits of some tokens at a time, and recompute them in backward."""
    kwargs = {"use_reentrant": False, "preserve_rng_state": False}
    losses = [
        checkpoint(eager, states, weight, some, "sum", **kwargs)
        for states, some in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    ]
    return torch.stack(losses).sum() / len(labels)


def ours(hidden, weight, labels):
    """Compute by slices of the vocabulary."""
    return linear_cross_entropy(hidden, weight, labels).mean()


def ours_into_main_grad(hidden, weight, labels):
    """Compute by slices of the vocabulary, and add to main_grad."""
    weight.main_grad = _main_grad(weight.shape, weight.device)
    return linear_cross_entropy(hidden, weight, labels, fused=True).mean()


def gemms_alone(hidden, weight, labels, into_main_grad=False):
    """Run the GEMMs of ours, slice by slice in the same memory, and nothing else."""
    plan = plan_for(hidden, weight, MEMORY, into_main_grad)

    def forward():
        buffer = hidden.new_empty(plan.buffer_size)
        gradient = torch.empty_like(weight) if plan.in_gradient else None
        for index in reversed(range(len(plan.slices))):
            multiply_into(plan.storage(index, buffer, gradient), index)
        return buffer, gradient

    def multiply_into(logits, index):
        torch.mm(hidden, weight[plan.slices[index]].t(), out=logits)

    @torch.no_grad()
    def full():
        buffer, gradient = forward()
        if gradient is None and not into_main_grad:
            gradient = torch.empty_like(weight)
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for index, part in enumerate(plan.slices):
            logits = plan.storage(index, buffer, gradient)
            if index >= plan.num_stored:
                multiply_into(logits, index)
            matmul_add_fp32(weight[part], logits.t(), total)
            if into_main_grad:
                matmul_add_fp32(hidden, logits, _main_grad(weight.shape, weight.device)[part])
            else:
                torch.mm(logits.t(), hidden, out=gradient[part])

    return {"fwd": torch.no_grad()(forward), "full": full}


def without_weight_gradient(hidden, weight, labels):
    """Compute what the variant with main_grad returns to autograd."""
    return eager(hidden, weight.detach(), labels)


@functools.lru_cache(maxsize=1)
def _main_grad(shape, device):
    return torch.zeros(shape, device=device)


def case(tokens, hidden, vocabulary, dtype=torch.bfloat16, into_main_grad=False):
    """Measure one shape."""
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
        "chunked": chunked,
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
        lower_bounds={GEMMS: functools.partial(gemms_alone, into_main_grad=into_main_grad)},
        work={"fwd": Work(flops=flops), "full": Work(flops=3 * flops)},
    )


def preference(log_probs):
    """Return the loss of the pairs from the log probability of each token."""
    chosen, rejected = log_probs.sum(-1).chunk(2)
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()


def dpo_ours(hidden, weight, labels):
    """Compute by slices of the vocabulary."""
    return preference(-linear_cross_entropy(hidden, weight, labels))


def dpo_eager(hidden, weight, labels):
    """Compute all logits and their logarithms in float32, as TRL does."""
    logits = torch.nn.functional.linear(hidden, weight)
    acc_dtype = torch.promote_types(logits.dtype, torch.float32)
    return preference(logits.to(acc_dtype).log_softmax(-1).gather(-1, labels[..., None])[..., 0])


def dpo_liger():
    """Compute by Liger, a pair at a time."""
    loss = optional("liger_kernel.chunked_loss:LigerFusedLinearDPOLoss")
    if loss is None:
        return None
    loss = loss(beta=BETA, use_ref_model=False)
    return lambda hidden, weight, labels: loss(weight, hidden, labels)[0]


def dpo_case(pairs, tokens, hidden, vocabulary, dtype=torch.bfloat16):
    """Measure one shape."""

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
            "ours": dpo_ours,
            "eager": dpo_eager,
            "compile": compiled(dpo_eager),
            "liger": dpo_liger(),
        },
        reference=dpo_eager,
        work={"fwd": Work(flops=flops), "full": Work(flops=3 * flops)},
    )


CASES = [
    case(8192, 1536, 151936),
    case(8192, 4096, 151936),
    case(8192, 4096, 128256),
    case(16384, 8192, 128256),
    case(8192, 1536, 151936, into_main_grad=True),
    case(8192, 4096, 151936, into_main_grad=True),
    dpo_case(2, 2048, 4096, 128256),
]
TINY = [
    case(5, 8, 24, torch.float32),
    case(5, 8, 24, torch.float32, into_main_grad=True),
    dpo_case(1, 5, 8, 24, torch.float32),
]
