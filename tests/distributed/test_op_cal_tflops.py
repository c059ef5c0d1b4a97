"""The operations counted in a step of a tiny GPT equal the closed form, with recompute and without.

Per token a GEMM with a weight costs 2 operations a number of it, and twice that backward; the
two GEMMs of attention cost 4 S H over all pairs of tokens, half of it where a causal kernel
leaves pairs out. Recomputed activations add a forward to what the device does, not to the model.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.gpt.layout import FFN, GLOBAL_BATCH, HEADS, HIDDEN, SEQUENCE, VOCABULARY, Layout
from tests.gpt.runs import in_ranks
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from tests.gpt.training import Training

_TOKENS = GLOBAL_BATCH * SEQUENCE
_OUTPUT = 2 * _TOKENS * HIDDEN * VOCABULARY
_LAYERS = 4
# Forward of a layer: query, key, value, projection, and the MLP.
_GPT = 2 * _TOKENS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN)
# Keys and values of half as many heads; gate, up and down.
_LLAMA = 2 * _TOKENS * (3 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
_ALL_PAIRS = 4 * _TOKENS * SEQUENCE * HIDDEN


def _counted(layout: Layout) -> tuple[float, float]:
    return in_ranks(layout, _count)[0]


def _attention(spec: str) -> int:
    """Megatron's own attention multiplies all pairs and masks; a causal kernel half of them."""
    return _ALL_PAIRS if spec == "local" else _ALL_PAIRS // 2


@pytest.mark.parametrize(
    ("family", "spec", "layer"), [("gpt", "local", _GPT), ("llama", "te", _LLAMA)]
)
def test_without_recompute_both_are_the_closed_form(family: str, spec: str, layer: int) -> None:
    expected = 3 * (_LAYERS * (layer + _attention(spec)) + _OUTPUT)
    assert _counted(Layout(family=family, spec=spec)) == (expected, expected)


@pytest.mark.parametrize(
    ("spec", "recompute", "layers"),
    [("local", ("full", "uniform", 1), _LAYERS), ("te", ("full", "block", 1), 1)],
)
def test_full_recompute_adds_the_forward_of_its_layers(spec, recompute, layers) -> None:
    model, hardware = _counted(Layout(spec=spec, recompute=recompute))
    layer = _GPT + _attention(spec)
    assert model == 3 * (_LAYERS * layer + _OUTPUT)
    assert hardware - model == layers * layer


@pytest.mark.parametrize("spec", ["local", "te"])
def test_selective_recompute_adds_the_forward_of_attention(spec: str) -> None:
    model, hardware = _counted(Layout(spec=spec, recompute=("selective", None, None)))
    assert hardware - model == _LAYERS * _attention(spec)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_ranks_share_the_work_of_one(layout: Layout) -> None:
    layout = replace(layout, recompute=("full", "uniform", 1))
    layer = _GPT + _ALL_PAIRS
    expected = (3 * (_LAYERS * layer + _OUTPUT), _LAYERS * layer * 4 + 3 * _OUTPUT)
    # Every rank tells the mean, counted in thousands.
    for counted in in_ranks(layout, _count):
        assert [2 * count for count in counted] == pytest.approx(expected, abs=2000)


def test_latent_attention_is_counted_by_its_own_sizes() -> None:
    """Keys of 8 + 4 numbers, values of 6: on a cpu torch multiplies all pairs of such sizes."""
    tokens, heads, hidden, ffn = 2 * SEQUENCE, HEADS, HIDDEN, FFN
    queries = hidden * 16 + 16 * heads * (8 + 4)
    keys_and_values = hidden * (24 + 4) + 24 * heads * (8 + 6)
    layer = queries + keys_and_values + heads * 6 * hidden + 2 * hidden * ffn
    attention = SEQUENCE * heads * (8 + 4 + 6)
    expected = 3 * 2 * tokens * (2 * (layer + attention) + hidden * VOCABULARY)
    assert run_ranks(_count_latent, 1) == [expected]


def _count_latent() -> float:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from mindspeed.tune.flop_counter import FlopCounter

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = MLATransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
        rope_type="rope",
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True)
    model = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope")
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE))
    positions = torch.arange(SEQUENCE).expand(2, -1)
    with FlopCounter() as counter:
        model(tokens, positions, None, labels=tokens).mean().backward()
    return counter.flops.model


def _count(training: "Training") -> tuple[float, float]:
    import mindspeed
    from mindspeed.tune.flop_meter import FlopMeter

    mindspeed.enable(op_cal_tflops=True)
    meter = FlopMeter()
    for _ in range(2):  # the second step is not counted again
        with meter.step():
            training.step()
    flops = meter.flops
    assert flops is not None
    return flops.model, flops.hardware
