"""Cross entropy from logits: one reading forward; a reading and a writing backward.

The gradient takes the place of the logits, so backward cannot run again on a kept graph.
"""

import torch
from op_case import Case, Work, compiled, optional

from mindspeed.ops.cross_entropy import cross_entropy


def eager(logits, target):
    """Compute as torch does, in float32, a loss a token."""
    return torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")


def case(tokens, vocabulary, dtype=torch.bfloat16):
    """Race one shape."""
    liger = optional("liger_kernel.transformers.functional:liger_cross_entropy")

    def inputs_of(tokens):
        def make_inputs(device):
            logits = torch.randn(tokens, vocabulary, device=device, dtype=dtype)
            target = torch.randint(0, vocabulary, (tokens,), device=device)
            return logits.requires_grad_(), target

        return make_inputs

    tensor = tokens * vocabulary * dtype.itemsize
    return Case(
        op="cross_entropy",
        shape=f"{tokens}x{vocabulary}",
        dtype=dtype,
        make_inputs=inputs_of(tokens),
        gate_inputs=inputs_of(min(tokens, 256)),
        peers={
            "ours": lambda logits, target: cross_entropy(logits, target, in_place=True),
            "eager": eager,
            "compile": compiled(eager),
            "liger": liger and (lambda logits, target: liger(logits, target, reduction="none")),
        },
        reference=lambda logits, target: torch.nn.functional.cross_entropy(
            logits, target, reduction="none"
        ),
        work={"fwd": Work(bytes=tensor), "full": Work(bytes=3 * tensor)},
    )


CASES = [case(1024, 32000), case(8192, 128256), case(8192, 151936), case(16384, 151936)]
TINY = [case(5, 24, torch.float32)]
