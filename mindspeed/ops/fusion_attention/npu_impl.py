"""fusion_attention on Ascend, as torch-npu 2.13.0 and 2.14.0 declare it:

npu_fusion_attention_v2(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, *,
    Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? query_rope=None,
    Tensor? key_rope=None, float scale=1., float keep_prob=1., int pre_tokens=2147483647,
    int next_tokens=2147483647, int inner_precise=0, int[]? prefix=None,
    int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0,
    bool gen_mask_parallel=True, bool sync=False, int pse_type=1, int[]? q_start_idx=None,
    int[]? kv_start_idx=None, ...) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)
"""

from typing import Any

import torch
import torch_npu

from mindspeed.ops.fusion_attention.reference import Options


def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute attention; the keyword arguments are the fields of `Options`."""
    given = Options(**options)
    return torch_npu.npu_fusion_attention_v2(
        query,
        key,
        value,
        head_num,
        input_layout,
        pse=given.pse,
        padding_mask=given.padding_mask,
        atten_mask=given.atten_mask,
        scale=given.scale,
        keep_prob=given.keep_prob,
        pre_tokens=given.pre_tokens,
        next_tokens=given.next_tokens,
        inner_precise=given.inner_precise,
        prefix=given.prefix,
        actual_seq_qlen=given.actual_seq_qlen,
        actual_seq_kvlen=given.actual_seq_kvlen,
        sparse_mode=given.sparse_mode,
        gen_mask_parallel=given.gen_mask_parallel,
        sync=given.sync,
        pse_type=given.pse_type,
        q_start_idx=given.q_start_idx,
        kv_start_idx=given.kv_start_idx,
    )
