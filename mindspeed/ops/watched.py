"""Whether somebody wants to see torch's own operators and nothing else."""

import torch


def is_watched() -> bool:
    """Say whether a compiler traces, or a mode like the counter of operations looks on."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
