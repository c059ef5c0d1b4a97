"""What attention refuses, exposes as attributes and keeps in checkpoints."""

import pytest
import torch

from mindspeed.config import ConfigError
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp_comm_type": "ring"}, "cp_comm_type=ring: use p2p, a2a, a2a.p2p or all_gather"),
        ({"cp_comm_type": "a2a+p2p"}, "cp_group must be a list of two: a2a, p2p"),
        ({"cp_group": [Group(2), Group(2)]}, "cp_comm_type=p2p: cp_group must be one process"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 cannot be reproduced with"),
    ],
)
def test_split_sequences_that_cannot_be_attended(options, message):
    attention = DotProductAttention(N, H, **{"cp_group": Group(2)} | options)
    with pytest.raises(ConfigError, match=message):
        attention(*make())


def test_windows_of_a_double_ring_divide_it():
    attention = DotProductAttention(N, H, cp_group=Group(6), cp_comm_type=None)
    assert attention.cp_comm_type == "p2p"
    for window in (0, 4, 6):
        attention.cp_window_size = window
        with pytest.raises(ConfigError, match=f"cp_window_size={window} .* use 1, 2 or 3"):
            attention(*make())


def test_two_sequences_cannot_be_split():
    q, k, v = make()
    attention = DotProductAttention(N, H, cp_group=Group(2))
    with pytest.raises(ValueError, match="queries and .* keys: attention between two sequences"):
        attention(q, k[:2], v[:2])
    bounds = torch.tensor([0, 4]), torch.tensor([0, 6])
    options = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_kv differ"):
        attention(q, k, v, cu_seqlens_q=bounds[0], cu_seqlens_kv=bounds[1], **options)


def test_without_a_group_nothing_is_split():
    attention = DotProductAttention(N, H, cp_group=Group(2))
    attention.set_context_parallel_group(None, None, None, "a2a")
    assert attention.cp_comm_type == "a2a"
    torch.testing.assert_close(attention(*make()), DotProductAttention(N, H)(*make()))


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
        (
            {"core_attention_bias_type": "alibi"},
            "core_attention_bias_type=alibi needs alibi_slopes",
        ),
        (
            {"core_attention_bias_type": "relative"},
            "core_attention_bias_type=relative: use no_bias",
        ),
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
