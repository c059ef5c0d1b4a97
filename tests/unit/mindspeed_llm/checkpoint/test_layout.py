"""Where layers go, and what is said of layouts that cannot be."""

import pytest

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.layout import Layout, LayoutRequest, Rank
from mindspeed_llm.models.config import ModelConfig, MoEConfig

SHAPE = ModelConfig(
    family="llama",
    num_layers=8,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=4,
    vocab_size=64,
    max_position_embeddings=64,
)
MOE = SHAPE.model_copy(
    update={
        "moe": MoEConfig(num_experts=6, topk=2, ffn_hidden_size=12, is_moe_layer=(True,) * 8),
    }
)


def held(layout):
    return [[[number for _, number in chunk.layers] for chunk in stage] for stage in layout.stages]


def test_pipeline():
    assert held(LayoutRequest(pp=2).layout(SHAPE)) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_virtual_stages_take_turns():
    layout = LayoutRequest(pp=2, layers_per_chunk=2).layout(SHAPE)
    assert held(layout) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    ends = [[(c.is_first, c.is_last) for c in stage] for stage in layout.stages]
    assert ends == [[(True, False), (False, False)], [(False, False), (False, True)]]


def test_layer_list():
    layout = LayoutRequest(pp=3, layer_list=(1, 5, 2)).layout(SHAPE)
    assert held(layout) == [[[0]], [[1, 2, 3, 4, 5]], [[6, 7]]]


def test_noops_keep_their_place():
    layout = LayoutRequest(pp=2, noop_layers=(0, 9)).layout(SHAPE)
    (first,), (second,) = layout.stages
    assert first.layers == ((1, 0), (2, 1), (3, 2), (4, 3))
    assert second.layers == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_ranks_with_their_own_expert_size():
    """As Megatron forms them: rank r is r modulo each size, in the order tensor, then expert."""
    layout = LayoutRequest(tp=4, ep=2, etp=1).layout(MOE)
    pairs = [(rank.tp, rank.ep) for rank in layout.ranks()]
    assert pairs == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [layout.folder(rank, 0) for rank in layout.ranks()][1] == "mp_rank_01_001"
    assert list(Rank(0, 1, ep=1, ep_size=2).experts(6)) == [3, 4, 5]


def test_kept_in_a_file():
    layout = LayoutRequest(tp=2, pp=2, ep=3, layers_per_chunk=1, noop_layers=(2, 3)).layout(MOE)
    assert Layout.from_plain(layout.as_plain(), "x") == layout
    with pytest.raises(ConfigError, match="file.pt: its layout entry is damaged"):
        Layout.from_plain({"tp": "many"}, "file.pt")


@pytest.mark.parametrize(
    "request_, message",
    [
        ({"tp": 3}, r"--target-tensor-parallel-size 3 does not divide the 4 key/value heads: use "
         "1, 2 or 4"),
        ({"pp": 3}, "--target-pipeline-parallel-size 3 does not divide the 8 layers: use 1, 2, 4 "
         "or 8 or give --num-layer-list"),
        ({"pp": 0}, "--target-pipeline-parallel-size 0 is too small: it must be at least 1"),
        ({"ep": 2}, "--target-expert-parallel-size 2: llama has no experts, use 1"),
        ({"pp": 2, "layers_per_chunk": 3}, "--num-layers-per-virtual-pipeline-stage 3 does not "
         "divide the 4 layers of a pipeline stage: use 1, 2 or 4"),
        ({"layers_per_chunk": 2}, "--num-layers-per-virtual-pipeline-stage 2 needs "
         "--target-pipeline-parallel-size of at least 2"),
        ({"pp": 2, "layer_list": (3, 4)}, "--num-layer-list 3,4 has 2 stages and 7 layers: "
         "--target-pipeline-parallel-size is 2 and the layers are 8"),
        ({"pp": 2, "layer_list": (0, 8)}, "--num-layer-list 0,8: every stage needs a layer"),
        ({"pp": 2, "layer_list": (4, 4), "layers_per_chunk": 2}, "--num-layer-list 4,4 cannot be "
         "given together with --num-layers-per-virtual-pipeline-stage: drop one of them"),
        ({"noop_layers": (9,)}, "--noop-layers names layer 9: with 8 layers and 1 no-ops the "
         "numbers are 0 to 8"),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_that_cannot_be(request_, message):
    with pytest.raises(ConfigError) as raised:
        LayoutRequest(**request_).layout(SHAPE)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "request_, message",
    [
        ({"ep": 4}, "does not divide the 6 experts"),
        ({"tp": 1, "etp": 2}, "--expert-tensor-parallel-size 2: the files of ranks are named by"),
        ({"tp": 2, "etp": 5}, "--expert-tensor-parallel-size 5 does not divide the 12 columns"),
    ],
    ids=str,
)
def test_expert_layouts_that_cannot_be(request_, message):
    with pytest.raises(ConfigError, match=message):
        LayoutRequest(**request_).layout(MOE)
