"""Norm and MLP in one module, against torch; and peft, which asks for the class by name."""

import peft
import pytest
import torch
from torch.nn import functional

from mindspeed.te.pytorch import LayerNormMLP

HIDDEN, FFN = 8, 12
ACTIVATIONS = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": functional.silu,
    "geglu": lambda x: functional.gelu(x[..., :FFN], approximate="tanh") * x[..., FFN:],
    "reglu": lambda x: torch.relu(x[..., :FFN]) * x[..., FFN:],
    "swiglu": lambda x: functional.silu(x[..., :FFN]) * x[..., FFN:],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_torch(activation):
    module = LayerNormMLP(
        HIDDEN, FFN, activation=activation, params_dtype=torch.float64, device="cpu"
    )
    for param in module.parameters():
        torch.nn.init.normal_(param)
    x = torch.randn(3, 2, HIDDEN, dtype=torch.float64)
    fc1, fc2 = module.fc1, module.fc2
    normed = functional.layer_norm(x, (HIDDEN,), fc1.layer_norm_weight, fc1.layer_norm_bias)
    inner = ACTIVATIONS[activation](functional.linear(normed, fc1.weight, fc1.bias))
    torch.testing.assert_close(module(x), functional.linear(inner, fc2.weight, fc2.bias))


def test_another_activation_is_refused():
    with pytest.raises(ValueError, match="use one of"):
        LayerNormMLP(HIDDEN, FFN, activation="tanh")


def test_peft_works_beside_the_adaptor():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    assert any("lora_A" in name for name, _ in adapted.named_parameters())
