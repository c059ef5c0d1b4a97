"""Vision-language models trained in shards against one process, every option on and off."""

import pytest
import torch

from tests.distributed.mm_models import train, train_sharded
from tests.mm import tiny
from tests.ranks import run_ranks

WRAP = {
    "internvl": ["model.vision_tower.encoder.layer.{*}", "model.language_model.layers.{*}"],
    "qwen2_5_vl": ["model.visual.blocks.{*}", "model.language_model.layers.{*}"],
}
META = {"init_model_with_meta_device": True}


def options(name, **more):
    return {"sharding_size": "auto", "sub_modules_to_wrap": WRAP[name], **more}


CASES = {
    "meta device": (META, {}),
    "tied, from the meta device": (META, {}),
    "recompute, chunked loss, ZeRO-2, prefetch": (
        {"loss_cfg": {"compute_mode": "chunk", "chunk_size": 5}},
        {
            "recompute_modules": ["model.language_model.layers.{*}"],
            "reshard_after_forward": False,
            "num_to_forward_prefetch": 1,
            "num_to_backward_prefetch": 2,
        },
    ),
    "replicated, not reentrant, all tokens in one chunk": (
        {"loss_cfg": {"compute_mode": "dynamic_chunk"}},
        {
            "sharding_size": 1,
            "recompute_modules": ["model.language_model.layers.{0}"],
            "use_reentrant": False,
        },
    ),
    "frozen eyes, ignored, offloaded": (
        {"image_encoder": {"vision_encoder": {"freeze": True}}},
        {"offload_to_cpu": True},
    ),
}
IGNORED = {"internvl": "model.vision_tower", "qwen2_5_vl": "model.visual.blocks.{*}"}


def settings(name, case):
    section, more = CASES[case]
    more = options(name, **more)
    if "ignored" in case:
        more |= {
            "ignored_modules": [IGNORED[name]],
            "sub_modules_to_wrap": ["model.language_model.layers.{*}"],
        }
    return section, more


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("mm")
    return {
        (name, tied): tiny.save(name, root / f"{name}-{tied}", tied)
        for name in WRAP
        for tied in (True, False)
    }


@pytest.fixture(scope="module")
def sharded(folders):
    keys = [(name, case) for name in WRAP for case in CASES]
    cases = [(name, folders[name, "tied" in case], *settings(name, case)) for name, case in keys]
    ranks = run_ranks(train_sharded, 2, cases, timeout=240)
    return {key: [rank[i] for rank in ranks] for i, key in enumerate(keys)}


def reference(name, case):
    """Train a plain model of transformers in this process, with its own loss."""
    model = tiny.new_model(name, "tied" in case)
    if "frozen" in case:
        eyes = model.model.vision_tower if name == "internvl" else model.model.visual
        eyes.requires_grad_(False)
        if name == "qwen2_5_vl":
            eyes.merger.requires_grad_(True)
    losses = train(Plain(model), name)
    return losses, {f"model.{key}": value for key, value in model.state_dict().items()}


class Plain(torch.nn.Module):
    """Gives the loss of transformers the name that ours has."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, **batch):
        return {"loss": self.inner(**batch).loss}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WRAP)
def test_twenty_steps_equal_those_of_one_process(sharded, name, case):
    losses, weights = reference(name, case)
    assert losses[0] - losses[-1] > 0.01  # it learns
    for rank_losses, rank_weights in sharded[name, case]:
        torch.testing.assert_close(rank_losses, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(rank_weights, weights, rtol=1e-5, atol=1e-5)
