"""The gated delta rule under the name and signature by which ms-swift imports it."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["chunk_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if asked for, the last state, as Megatron's own torch code does.

    With `cu_seqlens` the batch is one row of packed sequences, none of which sees another.
    """
    if scale not in (None, q.shape[-1] ** -0.5):
        raise ValueError(f"scale is {scale}: it can only be 1 / sqrt(head size), leave it out")
    if head_first:
        raise ValueError("head_first is not supported: give (batch, sequence, heads, size)")
    rule = _rule()
    flags: dict[str, Any] = {
        "chunk_size": chunk_size,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    if cu_seqlens is None:
        return rule(q, k, v, g, beta, initial_state=initial_state, **flags)
    outputs, states = [], []
    for index, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        part = [each[:, start:end] for each in (q, k, v, g, beta)]
        first = None if initial_state is None else initial_state[index : index + 1]
        output, state = rule(*part, initial_state=first, **flags)
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None


def _rule() -> Any:
    try:
        from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
    except ImportError:
        raise NotImplementedError(
            "mindspeed does not offer chunk_gated_delta_rule here: use megatron-core 0.16 or "
            "newer, which has it"
        ) from None
    return torch_chunk_gated_delta_rule
