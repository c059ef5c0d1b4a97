"""Fused operators do not change a model's results, and only matching modules are fused."""

from pydoc import locate

import pytest
import torch
from torch import nn

from mindspeed_mm.models import weights
from mindspeed_mm.models.fused_ops import _attend, depends_on_name, fuse
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.mm import tiny

# Norms and SwiGLU of two text layers and, where the vision tower has them, of its two blocks.
EXPECTED = {
    "internvl": {"RMSNorm": 5, "SwiGLU": 2},
    "llava": {"RMSNorm": 5, "SwiGLU": 2},
    "qwen2_vl": {"RMSNorm": 5, "SwiGLU": 2},
    "qwen2_5_vl": {"RMSNorm": 10, "SwiGLU": 4},
    "qwen3_vl": {"RMSNorm": 9, "SwiGLU": 2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fused_model_gives_equal_results(name):
    plain, fused = tiny.new_model(name), tiny.new_model(name)
    found = fuse(fused)
    assert {kind: found[kind] for kind in ("RMSNorm", "SwiGLU")} == EXPECTED[name]
    assert found["attention"]
    # Images of several sizes are packed for the towers that support it.
    tower = getattr(fused.model, "visual", None) or fused.model.vision_tower
    packs = name.startswith("qwen")
    assert tower.config._attn_implementation == f"mindspeed_{'flash_' if packs else ''}sdpa"
    batch = tiny.batch(name)
    if name != "internvl":
        batch["attention_mask"][1, -3:] = 0  # a mask that is needed as well
    results = []
    for model in (plain, fused):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 20
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["internvl", "qwen2_5_vl"])
def test_a_fused_model_loads_weights(name, tmp_path):
    folder = tiny.save(name, tmp_path)
    config = ModelConfig(init_from_hf_path=folder, fused_ops=True, init_model_with_meta_device=True)
    model, batch = TransformersModel(config), tiny.batch(name)
    weights.materialize(model)
    weights.load_pretrained(model, folder)
    loss = tiny.new_model(name)(**batch).loss
    torch.testing.assert_close(model(**batch)["loss"], loss, rtol=1e-5, atol=0)


FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48}


def test_a_model_that_compares_the_name_of_its_attention_keeps_it(tmp_path):
    plain = tiny.save_text("FalconForCausalLM", tmp_path, **FALCON)
    expected = plain(**tiny.text_batch()).loss
    found = fuse(plain)
    assert found["attention"] == 0 and plain.config._attn_implementation == "sdpa"
    torch.testing.assert_close(plain(**tiny.text_batch()).loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("falcon.modeling_falcon.FalconAttention", True),
        ("deepseek_v32.modeling_deepseek_v32.DeepseekV32Attention", True),
        ("glm5_next.modeling_glm5_next.Glm5NextTextAttention", True),
        ("llama.modeling_llama.LlamaAttention", False),
        ("gpt2.modeling_gpt2.GPT2Attention", False),
        ("llama.modeling_llama.LlamaForCausalLM", False),
    ],
)
def test_classes_that_compare_the_name(name, expected):
    assert depends_on_name(locate(f"transformers.models.{name}")) == expected


def test_a_position_bias_is_added():
    torch.manual_seed(0)
    q, k, v, bias = (torch.randn(2, 4, 6, n) for n in (8, 8, 8, 6))
    module = nn.Module()
    module.is_causal = True
    found, _ = _attend(module, q, k, v, None, position_bias=bias)
    scores = q @ k.mT / 8**0.5 + bias
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found, (scores.softmax(-1) @ v).transpose(1, 2))


def test_only_matching_modules_are_fused():
    class OnePlus(nn.Module):
        """Has the attributes of an RMSNorm, but scales by 1 + weight."""

        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    class Gelu(nn.Module):
        """An MLP with the parts of SwiGLU and another activation."""

        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
            self.act_fn = nn.GELU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Gated(nn.Module):
        """An RMSNorm that may get a gate, as in Mamba layers."""

        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x, gate=None):
            x = x if gate is None else x * gate
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    assert not fuse(nn.ModuleList([OnePlus(), Gelu(), Gated(), nn.LayerNorm(8), nn.Linear(8, 8)]))


def test_a_norm_of_another_dtype_than_its_input_is_unchanged():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(8)
    x = torch.randn(3, 8).bfloat16()
    before = norm(x)
    assert fuse(norm) == {"RMSNorm": 1}
    assert torch.equal(norm(x), before) and before.dtype == torch.float32
