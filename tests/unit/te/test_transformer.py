"""A whole layer equals torch's own, weight by weight."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from mindspeed.te.pytorch import TransformerLayer

HIDDEN, FFN, HEADS = 16, 24, 4


def copied_from(reference, fused):
    layer = TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=fused,
        params_dtype=torch.float64,
        device="cpu",
    )
    attention = reference.self_attn
    weights = {
        "qkv.layer_norm": reference.norm1,
        "projection.": attention.out_proj,
        "mlp.fc1.layer_norm": reference.norm2,
        "mlp.fc1.": reference.linear1,
        "mlp.fc2.": reference.linear2,
    }
    state = {}
    for name, module in weights.items():
        glue = "" if name.endswith(".") else "_"
        state |= {f"{name}{glue}{key}": value for key, value in module.state_dict().items()}
    for kind in ("weight", "bias"):
        whole = getattr(attention, f"in_proj_{kind}")
        names = [""] if fused else ["query_", "key_", "value_"]
        state |= {f"qkv.{name}{kind}": part for name, part in zip(names, whole.chunk(len(names)))}
    missing, unexpected = layer.load_state_dict(state, strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing)
    return layer


@pytest.mark.parametrize("fused", [True, False])
def test_it_equals_the_layer_of_torch(fused):
    torch.manual_seed(0)
    gelu = partial(functional.gelu, approximate="tanh")
    reference = torch.nn.TransformerEncoderLayer(
        HIDDEN, HEADS, FFN, dropout=0.0, activation=gelu, norm_first=True, dtype=torch.float64
    )
    layer = copied_from(reference, fused)
    x = torch.randn(5, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected = reference(x, src_mask=causal, is_causal=True)
    torch.testing.assert_close(layer(y), expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    layer(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-11, atol=1e-11)


def test_dropout_works_in_training_only():
    layer = TransformerLayer(HIDDEN, FFN, HEADS, hidden_dropout=0.5, device="cpu")
    x = torch.randn(5, 2, HIDDEN)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
