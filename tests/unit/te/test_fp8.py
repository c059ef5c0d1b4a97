"""FP8 is off, says so, and says what to do."""

import pytest
import torch

from mindspeed.te.common import recipe
from mindspeed.te.pytorch import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from mindspeed.te.pytorch.float8_tensor import Float8Tensor
from mindspeed.te.pytorch.fp8 import FP8GlobalStateManager
from mindspeed.te.pytorch.tensor import MXFP8Tensor, QuantizedTensor

SWITCHES = [fp8_autocast, autocast, fp8_model_init, quantized_model_init]


@pytest.mark.parametrize("switch", SWITCHES)
def test_on_is_refused_and_off_is_nothing(switch):
    with pytest.raises(RuntimeError, match="does not offer on cpu: train in bf16"):
        switch(enabled=True)
    with switch(enabled=False):
        assert torch.ones(1).item() == 1


def test_the_state_is_off():
    assert not FP8GlobalStateManager.is_fp8_enabled()
    assert FP8GlobalStateManager.get_fp8_recipe() is None
    available, reason = FP8GlobalStateManager.is_fp8_available()
    assert not available and "cpu" in reason


def test_no_tensor_is_quantised():
    assert issubclass(Float8Tensor, QuantizedTensor) and issubclass(MXFP8Tensor, QuantizedTensor)
    for tensor in (torch.ones(1), torch.nn.Parameter(torch.ones(1))):
        assert not isinstance(tensor, QuantizedTensor)
    with pytest.raises(RuntimeError, match="Float8Tensor asks for FP8"):
        Float8Tensor(torch.ones(1))


def test_recipes_describe_what_was_asked_for():
    assert recipe.Format.HYBRID.value.max_fwd == 448 and recipe.Format.HYBRID.value.max_bwd == 57344
    asked = recipe.DelayedScaling(margin=1, fp8_format=recipe.Format.E4M3, amax_history_len=16)
    assert asked.delayed() and asked.fp8_format is recipe.Format.E4M3
    for kind in (
        recipe.Float8CurrentScaling,
        recipe.Float8BlockScaling,
        recipe.MXFP8BlockScaling,
        recipe.NVFP4BlockScaling,
    ):
        assert not kind().delayed()


@pytest.mark.parametrize("fp8_recipe", ["delayed", "tensorwise", "mxfp8"])
def test_megatrons_fp8_flag_ends_in_one_clear_error(fp8_recipe):
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, fp8="hybrid", fp8_recipe=fp8_recipe
    )
    with pytest.raises(RuntimeError, match="fp8_autocast.* does not offer on cpu"):
        get_fp8_context(config)
