"""Cross entropy from logits: one read forward; a read and a write backward.

The gradient overwrites the logits, so backward cannot run again on a retained graph.
"""

import functools

import torch
from op_case import Case, Work, compiled, optional

from mindspeed import device
from mindspeed.ops.cross_entropy import cross_entropy


def eager(logits, target):
    """Return the loss of every token by eager torch, in float32."""
    return torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")


def of_three(function, *more):
    """Return a peer of a function for logits (s, b, V) and labels (s, b), as Megatron has them."""

    def peer(logits, target):
        return function(logits[:, None], target[:, None], *(x() for x in more))[:, 0]

    return function and peer


@functools.cache
def one_rank():
    """Return a process group of this rank alone, which Megatron needs."""
    backend, store = device.current().backend, torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    return torch.distributed.group.WORLD


def case(tokens, vocabulary, dtype=torch.bfloat16):
    """Measure one shape."""
    liger = optional("liger_kernel.transformers.functional:liger_cross_entropy")
    liger_split = optional("liger_kernel.megatron.cross_entropy:LigerMegatronCrossEntropy")
    megatron = optional(
        "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy"
    )

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
            "liger for Megatron": of_three(liger_split and liger_split()),
            "megatron-core": of_three(megatron, one_rank),
        },
        reference=lambda logits, target: torch.nn.functional.cross_entropy(
            logits, target, reduction="none"
        ),
        work={"fwd": Work(bytes=tensor), "full": Work(bytes=3 * tensor)},
    )


SHAPES = [(1024, 32000), (8192, 128256), (8192, 151936), (16384, 128256), (16384, 151936)]
CASES = [case(*shape) for shape in SHAPES]
TINY = [case(5, 24, torch.float32)]
