"""Weights of models built on the meta device: initialized, or loaded from a folder."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mindspeed.config import ConfigError
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.meta_device import initialize, meta_parameters
from mindspeed_mm.models.transformers.base_model import WeightInitMixin
from mindspeed_mm.models.weights import load_pretrained, materialize
from tests.mm import tiny


class Small(MultiModalModule, WeightInitMixin):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 6, padding_idx=2)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 8)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((3,), 7.0))
        self.register_buffer("steps", torch.arange(4.0), persistent=False)


def new_empty():
    with meta_parameters():
        model = Small()
    assert all(p.is_meta for p in model.parameters())
    assert not model.steps.is_meta
    materialize(model)
    return model


def test_parameters_are_allocated_later_and_buffers_and_ties_stay():
    model = new_empty()
    assert not any(p.is_meta for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.steps, torch.arange(4.0))


def test_initialization_follows_the_class_of_a_module():
    torch.manual_seed(5)
    model = new_empty()
    model.init_weights()
    assert model.norm.weight.eq(1).all() and model.norm.bias.eq(0).all()
    assert model.head.bias.eq(0).all() and model.embed.weight[2].eq(0).all()
    drawn = torch.cat([model.embed.weight[:2].flatten(), model.scale])
    assert 0.005 < drawn.std() < 0.05
    assert model.head.weight is model.embed.weight


def test_an_overridden_rule_is_used():
    class Own(Small):
        def _init_weights(self, module, std=0.02):
            super()._init_weights(module, std)
            if isinstance(module, nn.Embedding):
                nn.init.constant_(module.weight, 3.0)

    with meta_parameters():
        model = Own()
    materialize(model)
    model.init_weights()
    assert model.embed.weight.eq(3).all() and model.head.bias.eq(0).all()


def test_a_model_of_transformers_is_initialized_by_its_own_rules():
    with meta_parameters():
        model = tiny.new_model("internvl")
    materialize(model)
    torch.manual_seed(0)
    initialize(model)
    plain = tiny.new_model("internvl")
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name)
        # The same rule: where it draws no numbers, the same values; else the same spread.
        if parameter.unique().numel() == 1:
            assert torch.equal(found, parameter), name
        else:
            torch.testing.assert_close(found.std(), parameter.std(), rtol=0.5, atol=1e-3)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


def changed(tmp_path, change):
    folder = tmp_path / "hf"
    tiny.save("internvl", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


HEAD = "language_model.lm_head.weight"
MISMATCHES = {
    "missing": (lambda t: t.pop(HEAD), "lm_head.weight is missing"),
    "unexpected": (lambda t: t.update(more=torch.zeros(1)), "more is not expected"),
    "another shape": (
        lambda t: t.update({HEAD: torch.zeros(3, 3)}),
        r"lm_head.weight has shape \(3, 3\), the model expects \(64, 32\)",
    ),
    "quantized": (
        lambda t: t.update({HEAD: torch.zeros(64, 32, dtype=torch.int8)}),
        "is torch.int8",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatched_weights_raise(tmp_path, case):
    change, message = MISMATCHES[case]
    model = tiny.new_model("internvl")
    model._tied_weights_keys = {}
    with pytest.raises(ConfigError, match=message):
        load_pretrained(model, changed(tmp_path, change))


def test_buffers_of_older_files_are_ignored(tmp_path):
    frequencies = {"language_model.model.rotary_emb.inv_freq": torch.zeros(4)}
    model = tiny.new_model("internvl")
    load_pretrained(model, changed(tmp_path, lambda t: t.update(frequencies)))
    assert model.model.language_model.rotary_emb.inv_freq.all()


def test_a_rule_for_a_name_elsewhere_does_not_rename_a_name_of_the_model(tmp_path):
    # In DeepSeek-V4, `norm` becomes `kv_norm` in attention, but not at the end of the model.
    sizes = {"num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 8, "o_lora_rank": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    index = {"index_n_heads": 2, "index_head_dim": 8, "o_groups": 2}
    plain = tiny.save_text("DeepseekV4ForCausalLM", tmp_path, **sizes, **experts, **index)
    model = type(plain)(plain.config)
    load_pretrained(model, tmp_path)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_non_strict_loads_matching_tensors(tmp_path):
    def change(tensors):
        tensors.pop("multi_modal_projector.linear_1.bias")
        tensors.update(more=torch.zeros(1))
        tensors[HEAD] = tensors[HEAD] + 1

    model = tiny.new_model("internvl")
    before = model.lm_head.weight.clone()
    load_pretrained(model, changed(tmp_path, change), strict=False)
    assert torch.equal(model.lm_head.weight, before + 1)


def test_a_folder_without_safetensors_raises(tmp_path):
    model = tiny.new_model("internvl")
    with pytest.raises(ConfigError, match="is not a folder"):
        load_pretrained(model, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no weights: expected"):
        load_pretrained(model, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="pytorch_model.bin is a pickle"):
        load_pretrained(model, tmp_path)


def test_a_users_model_is_loaded_by_its_own_names(tmp_path):
    torch.manual_seed(1)
    source = Small()
    state = {k: v.clone() for k, v in source.state_dict().items() if k != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    model = new_empty()
    load_pretrained(model, tmp_path)
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
