"""ring_attention_update on Ascend, as torch-npu 2.13.0 and 2.14.0 declare it:

npu_ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum,
    Tensor cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, *,
    Tensor? actual_seq_qlen=None, str input_layout="SBH", str input_softmax_layout="")
    -> (Tensor, Tensor, Tensor)
"""

import torch
import torch_npu


def ring_attention_update(
    prev_attn_out: torch.Tensor,
    prev_softmax_max: torch.Tensor,
    prev_softmax_sum: torch.Tensor,
    cur_attn_out: torch.Tensor,
    cur_softmax_max: torch.Tensor,
    cur_softmax_sum: torch.Tensor,
    *,
    actual_seq_qlen: torch.Tensor | None = None,
    layout: str = "SBH",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the merged output and its two statistics; actual_seq_qlen has no effect."""
    return torch_npu.npu_ring_attention_update(
        prev_attn_out,
        prev_softmax_max,
        prev_softmax_sum,
        cur_attn_out,
        cur_softmax_max,
        cur_softmax_sum,
        actual_seq_qlen=actual_seq_qlen,
        input_layout=layout,
    )
