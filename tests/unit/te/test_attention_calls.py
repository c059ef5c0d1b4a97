"""What attention refuses, exposes as attributes and keeps in checkpoints."""

import pytest
import torch

from mindspeed.te.pytorch import DotProductAttention
from tests.unit.te.dense_attention import H, N, make


def test_state_dict_is_empty_and_swallows_foreign_fp8_state():
    model = torch.nn.Sequential(DotProductAttention(N, H))
    assert model.state_dict() == {}
    model.load_state_dict({"0._extra_state": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({"0.weight": torch.zeros(3)})


class Group:
    """A process group as far as its size."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def test_context_parallelism_says_that_it_is_not_there_yet():
    with pytest.raises(RuntimeError, match="context_parallel_size=2.*later release"):
        DotProductAttention(N, H, cp_group=Group(2))
    with pytest.raises(RuntimeError, match="context_parallel_size=4"):
        DotProductAttention(N, H, cp_group=[Group(1), Group(4)])
    attention = DotProductAttention(N, H, cp_group=Group(1))
    attention(*make())
    attention.set_context_parallel_group(Group(2), [0, 1], None, "a2a")
    assert attention.cp_comm_type == "a2a"
    with pytest.raises(RuntimeError, match="context_parallel_size=1"):
        attention(*make())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attn_mask_type": "diagonal"},
            "attn_mask_type=diagonal is not known: use no_mask, causal",
        ),
        ({"softmax_type": "learnable"}, "softmax_type=learnable is not supported: use vanilla"),
        ({"num_gqa_groups": 3}, "num_gqa_groups=3"),
        ({"num_gqa_groups": 2, "tp_size": 4}, "tp_size=4.*tp_size must divide both"),
    ],
)
def test_bad_construction(options, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(N, H, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_format": "hdbs"}, "qkv_format=hdbs is not known: use sbhd, bshd, thd"),
        ({"attn_mask_type": "padding"}, "needs an attention_mask"),
        ({"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(2, 2)}, "bool tensor of 4"),
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type=alibi: use no_bias"),
        ({"qkv_format": "thd"}, "needs cu_seqlens_q"),
    ],
)
def test_bad_call(options, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(N, H)(*make(), **options)


def test_a_call_without_causality_sees_all_keys_of_a_causal_module():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 1, 2, 4) for _ in range(3))
    causal = DotProductAttention(2, 4, attn_mask_type="causal")
    free = DotProductAttention(2, 4, attn_mask_type="no_mask")
    assert torch.equal(causal(q, k, v, attn_mask_type="no_mask"), free(q, k, v))
    assert not torch.equal(causal(q, k, v), free(q, k, v))


@pytest.mark.parametrize(
    "mask_type, given, expected",
    [
        ("causal", None, (-1, 0)),
        ("causal", (4, 4), (4, 0)),
        ("causal", (4, 0), (4, 0)),
        ("causal", [4, 0], [4, 0]),
        ("no_mask", None, (-1, -1)),
        ("no_mask", (3, 5), (3, 5)),
    ],
)
def test_the_window_in_force_is_an_attribute(mask_type, given, expected):
    attention = DotProductAttention(N, H, attn_mask_type=mask_type, window_size=given)
    assert attention.window_size == expected
