"""The documents' operators take their arguments by the documents' names and in their order."""

import importlib
import inspect

import pytest
import torch

import mindspeed.ops
from mindspeed.ops import npu_dropout_add_layer_norm, npu_ring_attention_update
from mindspeed.ops.fusion_attention.reference import NAMES

NORM = "x0 residual weight bias dropout_p epsilon rowscale layerscale prenorm residual_in_fp32"
NORM += " return_dropout_mask"
SUM = "x1 x2 residual gamma hcom reduce_op epsilon bias antiquant_scale antiquant_offset"
SUM += " dequant_scale antiquant_group_size comm_turn"
GMM = "x weight * bias group_list group_type gemm_fusion original_weight"
QUANT = "x weight scale * offset per_token_scale bias group_list output_dtype act_type"
PERMUTE = "tokens indices num_out_tokens padded_mode"
UNPERMUTE = "permuted_tokens sorted_indices probs padded_mode restore_shape"
EXPERTS = "x weight group_ep ep group_tp tp * bias shard_type"
MORE = " act_type need_allgather_out need_activation_feature"
LAYER = "x weight1 weight2 activation * expert_tokens expert_tokens_index bias1 bias2 scale offset"
LAYER += " deq_scale1 deq_scale2 antiquant_scale1 antiquant_scale2 antiquant_offset1"
LAYER += " antiquant_offset2 inner_precise output_dtype"
MERGE = "prev_attn_out prev_softmax_max prev_softmax_sum cur_attn_out cur_softmax_max"
MERGE += " cur_softmax_sum actual_seq_qlen layout"
ADAMW = "grad var m v s step lr ema_decay beta1 beta2 eps mode bias_correction weight_decay"
# What stands behind * is given by name only.
SIGNATURES = {
    "npu_all_to_all_all_gather_bmm": EXPERTS + MORE,
    "npu_alltoall_allgather_bmm": EXPERTS + MORE,
    "npu_apply_fused_ema_adamw": ADAMW,
    "npu_bmm_reduce_scatter_all_to_all": EXPERTS,
    "npu_bmm_reducescatter_alltoall": EXPERTS,
    "npu_dropout_add_layer_norm": NORM,
    "npu_dropout_add_rms_norm": NORM,
    "npu_ffn": LAYER,
    "npu_fused_moe_token_permute": PERMUTE,
    "npu_fused_moe_token_unpermute": UNPERMUTE,
    "npu_gmm": GMM,
    "npu_gmm_v2": GMM,
    "npu_grouped_mat_mul_all_reduce": "x weight hcomm * bias group_list split_item reduce_op "
    "comm_turn",
    "npu_groupmatmul_add_fp32": "x dy group_list out",
    "npu_matmul_add_fp32": "total_input grad_output grad",
    "npu_mm_all_reduce_add_rms_norm": SUM,
    "npu_mm_all_reduce_add_rms_norm_": SUM,
    "npu_moe_token_permute": PERMUTE,
    "npu_moe_token_unpermute": UNPERMUTE,
    "npu_quant_gmm": QUANT,
    "npu_quant_gmm_v2": QUANT,
    "npu_ring_attention_update": MERGE,
    "npu_rms_norm": "x gamma epsilon",
    "npu_rotary_position_embedding": "x cos sin mode",
    "npu_swiglu": "x dim * bias weights",
    "npu_weight_quant_gmm": "x weight antiquant_scale antiquant_offset * bias group_list act_type",
}
ATTENTION = (
    "pse padding_mask atten_mask scale keep_prob pre_tokens next_tokens inner_precise prefix"
)
ATTENTION += " actual_seq_qlen actual_seq_kvlen sparse_mode gen_mask_parallel sync pse_type"
ATTENTION += " q_start_idx kv_start_idx"


def names(operator):
    """Return the parameters of an operator, with a * before those that go by name only."""
    if operator._parameters:
        return list(operator._parameters)
    module, _, name = operator._reference.partition(":")
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    found = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(parameter.name)
    return found


def test_every_operator_of_the_documents_is_here():
    others = {"coc_ops", "npu_fusion_attention", "npu_fusion_attention_v2"}
    assert SIGNATURES.keys() == set(mindspeed.ops.__all__) - others


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_order(name):
    assert names(getattr(mindspeed.ops, name)) == SIGNATURES[name].split()


def test_names_of_the_attention():
    assert set(ATTENTION.split()) == set(NAMES)


def test_norm_by_position():
    x, residual, weight, bias, layerscale = (torch.randn(2, 3, 8), torch.randn(2, 3, 8)) + tuple(
        torch.randn(8) for _ in range(3)
    )
    given = x, residual, weight, bias, 0.0, 1e-5
    rowscale = torch.rand(2, 3)
    by_position = npu_dropout_add_layer_norm(*given, rowscale, layerscale, True, False, True)
    options = {"rowscale": rowscale, "layerscale": layerscale}
    options |= {"prenorm": True, "return_dropout_mask": True}
    by_name = npu_dropout_add_layer_norm(*given, **options)
    assert len(by_position) == 3
    torch.testing.assert_close(by_position, by_name)
    torch.testing.assert_close(by_position[1], x * rowscale.unsqueeze(-1) * layerscale + residual)


def test_merge_by_position():
    rows = torch.randn(2, 4, 3, 8)
    stats = torch.rand(4, 4, 3, 1).expand(-1, -1, -1, 8)
    given = rows[0], stats[0], stats[1], rows[1], stats[2], stats[3]
    by_position = npu_ring_attention_update(*given, torch.tensor([4]), "TND")
    torch.testing.assert_close(by_position, npu_ring_attention_update(*given, layout="TND"))
    with pytest.raises(ValueError, match="layout=SBH: outputs of shape"):
        npu_ring_attention_update(*given)


def test_what_is_not_a_parameter_is_refused_by_name():
    x, weight = torch.ones(1, 2, 8), torch.ones(8)
    with pytest.raises(TypeError, match="dropout_add_layer_norm does not take row_scale. It takes"):
        npu_dropout_add_layer_norm(x, None, weight, None, 0.0, 1e-5, row_scale=x)
    with pytest.raises(TypeError, match="does not take 12 arguments"):
        npu_dropout_add_layer_norm(x, None, weight, None, 0.0, 1e-5, *[None] * 6)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'rowscale'"):
        npu_dropout_add_layer_norm(x, None, weight, None, 0.0, 1e-5, None, rowscale=None)
