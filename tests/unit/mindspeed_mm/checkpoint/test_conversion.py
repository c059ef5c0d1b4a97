"""Hugging Face folders to DCP and back: the same bytes, the same names; what is refused."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from mindspeed.config import ConfigError
from mindspeed_mm.checkpoint import ConvertOptions
from mindspeed_mm.checkpoint.conversion import convert
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.mm import tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def go(load, save, **options):
    return convert(ConvertOptions(load_dir=str(load), save_dir=str(save), **options))


def new_moe():
    """Build a model whose experts are one tensor, but many in a file."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**tiny.TEXT, **experts, head_dim=8))


MODELS = {
    "internvl": lambda: tiny.new_model("internvl"),
    "qwen2_5_vl, tied": lambda: tiny.new_model("qwen2_5_vl", tied=True),
    "experts": new_moe,
}


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    model = MODELS[request.param]()
    model.to(torch.bfloat16).save_pretrained(root / "hf", max_shard_size="40KB")
    go(root / "hf", root / "dcp")
    return model, root


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def test_there_and_back_are_the_same_files(case, tmp_path):
    _, root = case
    go(root / "dcp", tmp_path / "back", model_assets_dir=str(root / "hf"))
    files = sorted(path.name for path in (root / "hf").iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    back = (path.name for path in (tmp_path / "back").iterdir())
    assert sorted({*back} - {"digests.json"}) == files
    for name in files:
        if not name.endswith(".index.json"):
            expected = (root / "hf" / name).read_bytes()
            assert (tmp_path / "back" / name).read_bytes() == expected, name


def test_without_the_original_weights_transformers_can_read_it(case, tmp_path):
    model, root = case
    go(root / "dcp", tmp_path / "back", params_dtype="fp32")
    found = type(model).from_pretrained(tmp_path / "back")
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value.float()), name
    assert found.dtype == torch.float32


def test_training_finds_the_names_it_has(case):
    model, root = case
    assert (root / "dcp" / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    own = TransformersModel(ModelConfig(init_from_hf_path=str(root / "hf")))
    state = {name: torch.zeros_like(p) for name, p in own.named_parameters()}
    loaded = {"model": state}
    dcp.load(loaded, checkpoint_id=root / "dcp" / "release", no_dist=True)
    for name, value in model.named_parameters():
        assert torch.equal(loaded["model"][f"model.{name}"], value.float()), name


def test_adapters_are_added_to_the_weights(tmp_path):
    folder = tiny.save("internvl", tmp_path / "hf")
    lora = {"r": 4, "alpha": 8, "target_modules": ("q_proj",)}
    own = TransformersModel(ModelConfig(init_from_hf_path=folder, lora=lora))
    torch.manual_seed(2)
    for name, parameter in own.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    dcp.save({"model": own.state_dict()}, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    with pytest.raises(ConfigError, match="has adapters .*give their --lora-alpha"):
        go(tmp_path / "iter_0000003", tmp_path / "out", model_assets_dir=folder)
    go(tmp_path / "iter_0000003", tmp_path / "out", model_assets_dir=folder, lora_alpha=8)
    merged = TransformersModel(ModelConfig(init_from_hf_path=str(tmp_path / "out")))
    batch = tiny.batch("internvl")
    torch.testing.assert_close(merged(**batch)["logits"], own(**batch)["logits"])


def test_a_users_model_needs_no_config(tmp_path):
    state = {"blocks.0.weight": torch.arange(6.0).view(2, 3), "model.bias": torch.ones(4)}
    (tmp_path / "mine").mkdir()
    save_file(state, tmp_path / "mine" / "model.safetensors")
    go(tmp_path / "mine", tmp_path / "dcp")
    loaded = {"model": {name: torch.zeros_like(t) for name, t in state.items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp" / "release", no_dist=True)
    assert all(torch.equal(loaded["model"][name], t) for name, t in state.items())
    go(tmp_path / "dcp", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert back.keys() == state.keys() and all(torch.equal(back[n], t) for n, t in state.items())


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_crafted_metadata_runs_nothing(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    marker = tmp_path / "ran"
    (tmp_path / "iter_0000001" / ".metadata").write_bytes(pickle.dumps(Command(str(marker))))
    with pytest.raises(ConfigError, match="refused"):
        go(tmp_path / "iter_0000001", tmp_path / "out")
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_invalid_requests_are_refused_and_write_nothing(case, tmp_path):
    _, root = case
    with pytest.raises(ConfigError, match="--save-dir is missing"):
        go(root / "hf", "")
    with pytest.raises(ConfigError, match="holds a checkpoint already"):
        go(root / "hf", root / "dcp")
    with pytest.raises(ConfigError, match="has no config.json"):
        go(root / "dcp", tmp_path / "out", model_assets_dir=str(tmp_path))
    short = tmp_path / "short"
    short.mkdir()
    (short / "config.json").write_bytes((root / "hf" / "config.json").read_bytes())
    found = tensors(root / "hf")
    name = next(name for name in found if name.endswith("embed_tokens.weight"))
    del found[name]
    save_file(found, short / "model.safetensors")
    with pytest.raises(ConfigError, match="embed_tokens.weight.* missing"):
        go(short, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_config_of_another_size_is_refused_both_ways(tmp_path):
    folder = Path(tiny.save("internvl", tmp_path / "hf"))
    go(folder, tmp_path / "dcp")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 40
    (folder / "config.json").write_text(json.dumps(config))
    said = r"mlp.*has the shape .*48.*config.json makes it .*40"
    with pytest.raises(ConfigError, match=said):
        go(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match=said):
        go(tmp_path / "dcp", tmp_path / "out", model_assets_dir=str(folder))
    assert not (tmp_path / "out").exists()
