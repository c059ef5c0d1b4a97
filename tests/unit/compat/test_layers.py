"""Megatron's local layers run with sequence parallelism and mixed dtypes."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mindspeed.compat.layers import (
    keep_type,
    promote,
    wrap_allreduce_word_embedding_grads,
    wrap_block_submodules,
    wrap_layer_init,
    wrap_torch_norm,
)


def config(**options):
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True} | options
    return TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, **options)


def build(config, eps=1e-3):
    return wrap_torch_norm(WrappedTorchNorm.__new__)(WrappedTorchNorm, config, 16, eps=eps)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norms_carry_the_mark_and_equal_torch(normalization, sequence_parallel):
    given = config(
        normalization=normalization,
        sequence_parallel=sequence_parallel,
        persist_layer_norm=True,
        memory_efficient_layer_norm=True,
    )
    norm = build(given)
    plain = getattr(torch.nn, normalization)(16, eps=1e-3)
    assert [n for n, _ in norm.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(p.sequence_parallel is sequence_parallel for p in norm.parameters())
    torch.manual_seed(0)
    for mine, other in zip(norm.parameters(), plain.parameters()):
        assert torch.equal(mine, other)
        with torch.no_grad():
            other.copy_(torch.randn(16))
    norm.load_state_dict(plain.state_dict())
    x = torch.randn(3, 2, 16)
    assert torch.equal(norm(x), plain(x))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centred_gamma(normalization):
    norm = build(config(normalization=normalization, layernorm_zero_centered_gamma=True))
    plain = getattr(torch.nn, normalization)(16, eps=1e-3)
    x = torch.randn(3, 16)
    assert (norm.weight == 0).all()
    assert torch.equal(norm(x), plain(x))
    with torch.no_grad():
        norm.weight.add_(0.5)
        plain.weight.add_(0.5)
    torch.testing.assert_close(norm(x), plain(x))


def test_other_norms_stay_with_megatron():
    calls = []

    def upstream(cls, config, hidden_size, eps):
        calls.append(hidden_size)
        return "norm"

    other = SimpleNamespace(normalization="L2Norm")
    assert wrap_torch_norm(upstream)(WrappedTorchNorm, other, 16) == "norm"
    assert calls == [16]


class Theirs:
    """Stands for the norm that a block takes when transformer_engine is there."""


def block_norm(spec):
    def upstream(config, spec, vp_stage=None):
        return TransformerBlockSubmodules(layer_specs=[spec] * 2, layer_norm=Theirs)

    block = wrap_block_submodules(upstream)(config(), spec, vp_stage=None)
    assert len(block.layer_specs) == 2
    return block.layer_norm


def layer_spec(norm):
    submodules = TransformerLayerSubmodules(input_layernorm=norm)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def test_final_norm_of_local_layers_is_theirs():
    assert block_norm(layer_spec(FusedLayerNorm)) is FusedLayerNorm
    assert block_norm(layer_spec(WrappedTorchNorm)) is WrappedTorchNorm
    local = get_gpt_layer_local_spec()
    assert block_norm(local) is local.submodules.input_layernorm


@pytest.mark.parametrize(
    ("normalization", "norm"), [("LayerNorm", FusedLayerNorm), ("RMSNorm", WrappedTorchNorm)]
)
def test_a_mixture_of_local_layers_ends_with_a_norm_of_its_kind(normalization, norm):
    spec = TransformerBlockSubmodules(layer_specs=[], layer_norm=FusedLayerNorm)
    wrapped = wrap_block_submodules(lambda config, spec: spec)
    assert wrapped(config(normalization=normalization), spec).layer_norm is norm


@pytest.mark.parametrize("norm", [IdentityOp, Theirs])
def test_final_norm_of_other_layers_stays(norm):
    assert block_norm(layer_spec(norm)) is Theirs
    assert block_norm(TransformerBlockSubmodules()) is Theirs


def plain(input, weight, bias, scale=1.0):
    return torch.nn.functional.linear(input, weight, bias) * scale


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_equal_the_wider_type(by_keyword, biased):
    torch.manual_seed(0)
    x = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(3, 4).half().requires_grad_()
    bias = torch.randn(3).half().requires_grad_() if biased else None
    call = {"input": x, "weight": weight, "bias": bias}
    output = (
        promote(plain)(**call, scale=2.0) if by_keyword else promote(plain)(*call.values(), 2.0)
    )
    expected = plain(x, weight.float(), None if bias is None else bias.float(), 2.0)
    assert output.dtype == torch.float32 and torch.equal(output, expected)
    output.sum().backward()
    assert weight.grad.dtype == torch.float16
    torch.testing.assert_close(weight.grad, (2 * x.detach().sum(0)).half().expand(3, 4))


def test_equal_types_reach_the_original_unchanged():
    seen = []
    original = lambda input, weight, bias, extra: seen.append((input, weight, bias, extra))  # noqa: E731
    x, weight = torch.ones(2, 2).half(), torch.ones(2, 2).half()
    promote(original)(x, weight, None, extra=7)
    assert all(a is b for a, b in zip(seen[0], (x, weight, None, 7)))


def test_probabilities_keep_the_type_of_the_scores():
    as_bf16 = keep_type(lambda self, input, mask: torch.softmax(input, -1).bfloat16())
    assert as_bf16(None, torch.ones(2, 2), None).dtype == torch.float32
    assert as_bf16(None, torch.ones(2, 2).bfloat16(), mask=None).dtype == torch.bfloat16


class UpstreamLayer:
    def __init__(self, config, layer_number=1):
        self.layer_number = layer_number
        self.comm_type = config.cp_comm_type[self.layer_number]


class FixedLayer:
    def __init__(self, config, layer_number=1):
        self.comm_type = config.cp_comm_type[layer_number - 1]


def test_a_list_of_algorithms_begins_with_the_first_layer():
    config = SimpleNamespace(cp_comm_type=["p2p", "a2a"])
    for upstream in (UpstreamLayer, FixedLayer):
        layer = type("Layer", (), {"__init__": wrap_layer_init(upstream.__init__)})
        assert [layer(config=config, layer_number=n).comm_type for n in (1, 2)] == ["p2p", "a2a"]
        assert config.cp_comm_type == ["p2p", "a2a"]
    assert wrap_layer_init(FixedLayer.__init__) is FixedLayer.__init__


@pytest.mark.parametrize("further", [0, 1])
@pytest.mark.parametrize("is_trained", [True, False])
def test_the_gradient_of_a_frozen_embedding_is_not_reduced(is_trained, further):
    """The last stage has the shared weight in its output layer, or for multi-token prediction."""
    weight = torch.nn.Parameter(torch.zeros(2), requires_grad=is_trained)
    stage = SimpleNamespace(
        pre_process=False,
        share_embeddings_and_output_weights=not further,
        shared_embedding_or_output_weight=lambda: weight,
    )
    reduced = []
    config = SimpleNamespace(mtp_num_layers=further)
    wrap = wrap_allreduce_word_embedding_grads(lambda model, config: reduced.append(model))
    wrap([stage], config)
    assert reduced == ([[stage]] if is_trained else [])
