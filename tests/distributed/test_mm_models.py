"""Sharded training of vision-language models against one process, every option on and off."""

import pytest
import torch

from tests.distributed.mm_models import train, train_sharded
from tests.mm import tiny
from tests.ranks import run_ranks

VISION = {
    "internvl": "model.vision_tower.encoder.layer.{*}",
    "qwen2_5_vl": "model.visual.blocks.{*}",
}
LAYERS = "model.language_model.layers.{*}"

CASES = {
    # The model, its section, and what the FSDP2 options add to sharded layers.
    "tied, from the meta device": ("internvl", {"init_model_with_meta_device": True}, {}),
    "chunked loss, recompute, ZeRO-2": (
        "internvl",
        {"loss_cfg": {"compute_mode": "chunk", "chunk_size": 5}},
        {
            "recompute_modules": [LAYERS],
            "reshard_after_forward": False,
            "sub_modules_to_wrap": [VISION["internvl"], LAYERS, "lm_head"],
        },
    ),
    "chunks of tokens, replicated": (
        "qwen2_5_vl",
        {"loss_cfg": {"compute_mode": "dynamic_chunk", "chunk_size": 7}},
        {"sharding_size": 1},
    ),
    "frozen vision, ignored, offloaded": (
        "qwen2_5_vl",
        {
            "image_encoder": {"vision_encoder": {"freeze": True}},
            "init_model_with_meta_device": True,
        },
        {
            "offload_to_cpu": True,
            "ignored_modules": [VISION["qwen2_5_vl"]],
            "sub_modules_to_wrap": [LAYERS],
        },
    ),
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    root = tmp_path_factory.mktemp("mm")
    cases = []
    for case, (name, section, more) in CASES.items():
        folder = tiny.save(name, root / case, tied="tied" in case)
        wrap = {"sharding_size": "auto", "sub_modules_to_wrap": [VISION[name], LAYERS]}
        cases.append((name, folder, section, wrap | more))
    ranks = run_ranks(train_sharded, 2, cases, timeout=240)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


def reference(case):
    """Train a plain model of transformers in this process, with its own loss."""
    name = CASES[case][0]
    model = tiny.new_model(name, "tied" in case)
    if "frozen" in case:
        model.model.visual.requires_grad_(False)
        model.model.visual.merger.requires_grad_(True)
    losses = train(Plain(model), name)
    return losses, {f"model.{key}": value for key, value in model.state_dict().items()}


class Plain(torch.nn.Module):
    """Returns the loss of transformers under the key of ours."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, **batch):
        return {"loss": self.inner(**batch).loss}


@pytest.mark.parametrize("case", CASES)
def test_sharded_training_equals_one_process(sharded, case):
    losses, weights = reference(case)
    assert losses[0] - losses[-1] > 0.01  # it trains
    for rank_losses, rank_weights in sharded[case]:
        torch.testing.assert_close(rank_losses, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(rank_weights, weights, rtol=1e-5, atol=1e-5)
