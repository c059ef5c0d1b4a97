"""The switches of grouped GEMMs and of the fused permutation."""

import pytest
import torch

import mindspeed.megatron_adaptor  # noqa: F401  # before Megatron, as in a user's script
from mindspeed.config import ConfigError, Spelling
from mindspeed.features.activation import Activation
from mindspeed.features.base import Context
from mindspeed.features.fusion.weight_gradient_fusion import WeightGradientFusion
from mindspeed.features.moe.fused_moe_permute import FusedMoePermute
from mindspeed.features.moe.grouped_gemm import MoeGroupedGemm, MoeWeightGradientFusion
from mindspeed.features.registry import Registry


@pytest.fixture
def switched_on():
    """Return a function that turns one feature on until the test ends."""
    running = []

    def turn_on(feature, **options):
        activation = Activation(Registry([feature]))
        activation.activate(activation.registry.options_class(**options))
        running.append(activation)

    yield turn_on
    for activation in running:
        activation.deactivate()


@pytest.fixture
def grouped_gemm_util():
    """The GEMMs of the legacy experts, which megatron-core 0.19 no longer has."""
    return pytest.importorskip("megatron.core.transformer.moe.grouped_gemm_util")


def gemm_and_parameter(grouped_gemm_util):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(6, 3 * 4).bfloat16())
    parameter.main_grad = torch.ones(6, 12)
    parameter.grad_added_to_main_grad = False
    x, dy = torch.randn(7, 6).bfloat16(), torch.randn(7, 4).bfloat16()
    out = grouped_gemm_util.ops.gmm(x, parameter.view(3, 6, 4), torch.tensor([2, 0, 5]))
    out.backward(dy)
    pieces = zip(x.double().split([2, 0, 5]), dy.double().split([2, 0, 5]))
    return parameter, torch.stack([a.t() @ b for a, b in pieces])


def test_gradients_of_grouped_experts_go_to_main_grad(switched_on, grouped_gemm_util):
    plain, exact = gemm_and_parameter(grouped_gemm_util)
    assert not plain.grad_added_to_main_grad and torch.equal(plain.main_grad, torch.ones(6, 12))
    torch.testing.assert_close(plain.grad.double().view(3, 6, 4), exact, rtol=2**-8, atol=1e-6)

    switched_on(MoeWeightGradientFusion(), gemm_gradient_accumulation_fusion=True)
    fused, exact = gemm_and_parameter(grouped_gemm_util)
    assert fused.grad_added_to_main_grad and fused.grad is not None
    torch.testing.assert_close(fused.main_grad.double().view(3, 6, 4), exact + 1)
    assert not torch.equal(exact.bfloat16().double(), exact)  # rounding would have shown


def test_a_matrix_without_main_grad_is_left_to_autograd(switched_on, grouped_gemm_util):
    switched_on(MoeWeightGradientFusion(), gemm_gradient_accumulation_fusion=True)
    weight = torch.randn(2, 3, 4, requires_grad=True)
    grouped_gemm_util.ops.gmm(torch.ones(5, 3), weight, torch.tensor([1, 4])).sum().backward()
    assert torch.equal(weight.grad, torch.tensor([1.0, 4.0]).view(2, 1, 1).expand(2, 3, 4))


def test_permutation_sets_megatrons_field(switched_on):
    from megatron.core.transformer import TransformerConfig

    def made(**more):
        return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **more)

    experts = {
        "num_moe_experts": 2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    }
    assert not made(**experts).moe_permute_fusion
    switched_on(FusedMoePermute(), use_fused_moe_token_permute_and_unpermute=True)
    assert made(**experts).moe_permute_fusion
    assert not made().moe_permute_fusion


def options(feature, **given):
    return Registry([feature]).options_class(**given)


def test_what_megatron_switches_on():
    off, on = Context(megatron={}), Context(megatron={"moe_grouped_gemm": True})
    assert not MoeGroupedGemm().is_on(None, off) and MoeGroupedGemm().is_on(None, on)
    fusion = WeightGradientFusion()
    assert fusion.is_on(None, off)
    assert not fusion.is_on(None, Context(megatron={"gradient_accumulation_fusion": False}))
    permute = FusedMoePermute()
    none = options(permute)
    assert not permute.is_on(none, off)
    assert permute.is_on(none, Context(megatron={"moe_permute_fusion": True}))
    assert not list(permute.patches(none))


@pytest.mark.parametrize(
    "feature, arguments, message",
    [
        (MoeWeightGradientFusion(), {}, "needs --moe-grouped-gemm"),
        (
            MoeWeightGradientFusion(),
            {"moe_grouped_gemm": True, "gradient_accumulation_fusion": False},
            "--no-gradient-accumulation-fusion contradict",
        ),
        (
            FusedMoePermute(),
            {"num_experts": 4, "moe_token_dispatcher_type": "allgather"},
            "needs --moe-token-dispatcher-type alltoall or alltoall_seq or flex, not allgather",
        ),
        (
            FusedMoePermute(),
            {"num_experts": 4, "moe_expert_capacity_factor": 1.0},
            "--moe-pad-expert-input",
        ),
        (FusedMoePermute(), {}, "is for layers of experts, and this model has none: drop it"),
    ],
)
def test_what_is_refused(feature, arguments, message):
    context = Context(spelling=Spelling.FLAG, megatron=arguments)
    with pytest.raises(ConfigError, match=message):
        feature.check(options(feature, **{feature.enabled_by: True}), context)


def test_what_is_accepted():
    permute = FusedMoePermute()
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    padded["num_experts"] = 4
    asked = options(permute, use_fused_moe_token_permute_and_unpermute=True)
    permute.check(asked, Context(megatron=padded))
    permute.check(options(permute), Context(megatron={"moe_token_dispatcher_type": "allgather"}))
    fusion = MoeWeightGradientFusion()
    fusion.check(options(fusion), Context(megatron={"moe_grouped_gemm": True}))
