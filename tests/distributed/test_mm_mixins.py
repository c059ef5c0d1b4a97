"""The document's classes as it types them: user models, third-party models, own strategies."""

import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from mindspeed.config import ConfigError, build
from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.models import meta_device, weights
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers.base_model import (
    FSDP2Mixin,
    WeightInitMixin,
    set_fullyshard_modules_to_wrap,
    set_modules_to_prefetch,
    set_recompute_modules_to_wrap,
)
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.distributed.mm_models import full_weights, part
from tests.distributed.test_fsdp_experts import Model as Mixture
from tests.mm import tiny
from tests.ranks import run_ranks

FILE = """\
sharding_size: auto
sub_modules_to_wrap: ["blocks.{*}"]
recompute_modules: ["blocks.{0}"]
num_to_forward_prefetch: 1
num_to_backward_prefetch: 2
"""


class CustomModel(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class AsInTheDocument(CustomModel):
    def _fully_shard(self, fsdp2_kwargs=None, fsdp2_config=None):
        set_recompute_modules_to_wrap()
        set_fullyshard_modules_to_wrap()
        num_to_forward_prefetch = getattr(self.fsdp2_config, "num_to_forward_prefetch", 0)
        num_to_backward_prefetch = getattr(self.fsdp2_config, "num_to_backward_prefetch", 0)
        set_modules_to_prefetch(num_to_forward_prefetch, num_to_backward_prefetch)


class WithArguments(CustomModel):
    def _fully_shard(self, fsdp2_kwargs=None, fsdp2_config=None):
        set_recompute_modules_to_wrap(self, [self.blocks[1]], use_reentrant=False)
        set_fullyshard_modules_to_wrap(self, ["blocks.{0-1}", self.head], **fsdp2_kwargs)
        set_modules_to_prefetch(self, 2, 1)


class ByHand(CustomModel):
    def _fully_shard(self, fsdp2_kwargs=None, fsdp2_config=None):
        for block in self.blocks:
            fully_shard(block, **fsdp2_kwargs)
        fully_shard(self, **fsdp2_kwargs)


SHARDED = {
    CustomModel: {"blocks.0", "blocks.1", "blocks.2", ""},
    AsInTheDocument: {"blocks.0", "blocks.1", "blocks.2", ""},
    WithArguments: {"blocks.0", "blocks.1", "head", ""},
    ByHand: {"blocks.0", "blocks.1", "blocks.2", ""},
}


def shard_users_models(folder):
    path = Path(folder) / f"fsdp2_config_{dist.get_rank()}.yaml"
    path.write_text(FILE)
    found = {}
    for kind in SHARDED:
        torch.manual_seed(4)
        model = kind()
        assert model.fully_shard(fsdp2_config=path) is True
        model(torch.ones(2, 6)).backward()
        names = {n for n, m in model.named_modules() if isinstance(m, FSDPModule)}
        recomputed = {n for n, m in model.named_modules() if "forward" in vars(m)}
        gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        found[kind.__name__] = names, recomputed, gradients
    return found


def test_a_user_model_and_its_own_strategies(tmp_path):
    torch.manual_seed(4)
    plain = CustomModel()
    plain(torch.ones(2, 6)).backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    for found in run_ranks(shard_users_models, 2, str(tmp_path)):
        for kind, names in SHARDED.items():
            sharded, recomputed, gradients = found[kind.__name__]
            assert sharded == names
            expected = {WithArguments: {"blocks.1"}, ByHand: set()}.get(kind, {"blocks.0"})
            assert recomputed == expected
            torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-7)


def test_a_step_outside_of_fully_shard_raises():
    with pytest.raises(ConfigError, match="no model is being sharded"):
        set_recompute_modules_to_wrap()


def begin_on_meta(sharding_size):
    torch.manual_seed(9)
    with meta_device.meta_parameters():
        model = CustomModel()
    model.fully_shard(fsdp2_config=FsdpOptions(sharding_size=sharding_size))
    weights.materialize(model)
    model.init_weights()
    return full_weights(model)


def test_initial_weights_do_not_depend_on_the_world_size():
    (alone,) = run_ranks(begin_on_meta, 1, "auto")
    for found in [*run_ranks(begin_on_meta, 3, "auto"), *run_ranks(begin_on_meta, 2, 1)]:
        torch.testing.assert_close(found, alone, rtol=0, atol=0)


class MixtureOfExperts(Mixture, MultiModalModule, FSDP2Mixin, WeightInitMixin):
    pass


def share_experts(folder):
    """Return this rank's experts of a model: initialized, then loaded from a folder."""
    with meta_device.meta_parameters():
        model = MixtureOfExperts()
    options = FsdpOptions(expert_parallel_size=2, moe_modules=("experts",), sharding_size="auto")
    model.fully_shard(fsdp2_config=options)
    weights.materialize(model)
    torch.manual_seed(9)
    model.init_weights()
    first = full_weights(model)
    weights.load_pretrained(model, folder)
    return first, full_weights(model)


def test_expert_parallel_ranks_have_different_experts(tmp_path):
    plain = MixtureOfExperts()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    saved = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    torch.manual_seed(9)
    plain.init_weights()
    for rank, found in enumerate(run_ranks(share_experts, 4, str(tmp_path))):
        for wanted, values in zip((plain.state_dict(), saved), found):
            for name, tensor in wanted.items():
                half = tensor.chunk(2)[rank % 2] if name.startswith("experts.") else tensor
                assert torch.equal(values[name], half), name


def three_steps(folder):
    """Adapt, register, use: the third-party model of the document."""
    from transformers import InternVLForConditionalGeneration

    class InternVLChatModelGeneration(
        InternVLForConditionalGeneration, FSDP2Mixin, WeightInitMixin
    ):
        def __init__(self, config, vision_model=None, language_model=None, use_flash_attn=True):
            super().__init__(config)

    ModelHub.MODEL_MAPPINGS["internvl"] = InternVLChatModelGeneration
    section = {
        "model_id": "internvl",
        "init_from_hf_path": folder,
        "init_model_with_meta_device": True,
        "lora": {"target_modules": ("model.language_model.layers.{*}.self_attn.q_proj",)},
    }
    model = TransformersModel(build(ModelConfig, section))
    values = {
        "sharding_size": "auto",
        "sub_modules_to_wrap": ["model.language_model.layers.{*}"],
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
    }
    model.fully_shard(fsdp2_config=build(FsdpOptions, values))
    weights.materialize(model)
    weights.load_pretrained(model, folder)
    adapters = {n: t for n, t in full_weights(model).items() if ".lora_" in n}
    seen = {}
    layer = model.model.model.language_model.layers[0]
    layer.register_forward_pre_hook(lambda m, args: seen.update(input=args[0].dtype))
    layer.mlp.register_forward_pre_hook(lambda m, args: seen.update(weight=m.up_proj.weight.dtype))
    batch = part(tiny.batch("internvl"), dist.get_rank(), 1)
    result = model(**batch)
    result["loss"].backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    seen["kept"] = {p.to_local().dtype for p in model.parameters()}
    seen["reduced"] = {g.to_local().dtype for g in gradients.values()}
    return seen, float(result["loss"]), list(gradients), adapters


def test_a_third_party_model_in_three_steps(tmp_path):
    folder = tiny.save("internvl", tmp_path)
    plain = tiny.new_model("internvl").bfloat16()
    found = run_ranks(three_steps, 2, folder)
    for rank, (seen, loss, trained, adapters) in enumerate(found):
        assert seen["input"] == seen["weight"] == torch.bfloat16
        assert seen["kept"] == seen["reduced"] == {torch.float32}
        batch = part(tiny.batch("internvl"), rank, 1)
        batch["pixel_values"] = batch["pixel_values"].bfloat16()
        assert abs(loss - plain(**batch).loss.item()) < 0.02
        assert sorted(trained) == sorted(adapters) and len(trained) == 4
        for name, values in adapters.items():  # their output is zero, but they have gradients
            assert values.any() == (".lora_A." in name)
            assert torch.equal(values, found[0][3][name])


LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 16000}


def start_large(folder):
    """Load a sharded model and return its peak and its final memory, in bytes."""
    config = ModelConfig(init_from_hf_path=folder, init_model_with_meta_device=True)
    before, highest, done = _anonymous(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            highest[0] = max(highest[0], _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = TransformersModel(config)
    options = {"sharding_size": "auto", "sub_modules_to_wrap": ["model.layers.{*}"]}
    model.fully_shard(fsdp2_config=build(FsdpOptions, options))
    weights.materialize(model)
    weights.load_pretrained(model, folder)
    done.set()
    watcher.join()
    shard = sum(p.to_local().nbytes for p in model.parameters())
    one = max(p.numel() * p.element_size() for p in model.parameters())
    return highest[0] - before, shard, one


def _anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_loading_takes_a_shard_and_a_tensor(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**{**tiny.TEXT, **LARGE})
    Qwen2ForCausalLM(config).save_pretrained(tmp_path, max_shard_size="50MB")
    for peak, shard, one in run_ranks(start_large, 2, str(tmp_path)):
        assert peak < 1.2 * shard + one, (peak, shard, one)


def wrong_group():
    half = dist.new_group([0])
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError, match="fully_shard over 1 of 2 ranks"):
            CustomModel().fully_shard(process_group=half)
    model = CustomModel()
    model.fully_shard(process_group=dist.group.WORLD)
    return all(isinstance(p, DTensor) for p in model.parameters())


def test_fully_shard_takes_all_ranks():
    assert run_ranks(wrong_group, 2) == [True, True]
