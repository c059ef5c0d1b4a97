"""Sharded ranks on mixed data: one has images, another only text or nothing, without deadlock."""

import json

import numpy as np
import torch
from PIL import Image

from mindspeed.config import build
from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.data import DataConfig, build_mm_dataloader, build_mm_dataset
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.mm import processors
from tests.ranks import run_ranks

MODELS = {
    "qwen2_5_vl": ("model.visual.blocks.{*}", "model.language_model.layers.{*}"),
    "internvl": ("model.vision_tower.encoder.layer.{*}", "model.language_model.layers.{*}"),
}
RECORDS = 5
"""On two ranks the last step has no record for one of them."""


def write(name, folder):
    """Write a model with its processor, and records of which every other one has an image."""
    processors.save(name, folder)
    processors.new_model(name).save_pretrained(folder)
    random = np.random.default_rng(1)
    rows = []
    for number in range(RECORDS):
        file = folder / f"{number}.png"
        Image.fromarray(random.integers(0, 255, (16, 24, 3), np.uint8)).save(file)
        images = [file.name] if number % 2 else []
        question = f"{'<image>' * len(images)} How much is {number} + 30?"
        said = [("human", question), ("gpt", f"It is {number + 30}.")]
        said = [{"from": role, "value": text} for role, text in said]
        rows.append({"conversations": said, "images": images})
    (folder / "rows.json").write_text(json.dumps(rows))


def evaluate(root, shard):
    """Run every record once; return for each model the losses and their token counts."""
    found = {name: _evaluate(name, f"{root}/{name}", shard) for name in MODELS}
    return found | {"rows": packed(f"{root}/internvl")}


def open_data(folder, **more):
    basic = {"dataset": f"{folder}/rows.json", **more}
    values = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": folder}}
    config = build(DataConfig, {"dataset_param": values})
    return build_mm_dataset(config.dataset_param)


def packed(folder):
    """Return the tokens of every row; the scan is split among ranks."""
    rows = open_data(folder, packing=True, cutoff_len=96)
    return [[sample.ids.tolist() for sample in row] for row in rows]


def _evaluate(name, folder, shard):
    param = {"batch_size": 1, "shuffle": False, "drop_last": False}
    loader = build_mm_dataloader(open_data(folder), param)
    model = TransformersModel(build(ModelConfig, {"init_from_hf_path": folder}))
    if shard:
        options = FsdpOptions(sharding_size="auto", sub_modules_to_wrap=MODELS[name])
        model.fully_shard(fsdp2_config=options)
    found = []
    for batch in loader:
        output = model(**batch)
        output["loss"].backward()
        tokens = int(output["token_nums"])
        found.append((output["loss"].item() * tokens, tokens))
    return found


def test_ranks_without_images_or_records_run_with_the_others(tmp_path):
    for name in MODELS:
        write(name, tmp_path / name)
    single = evaluate(str(tmp_path), False)
    ranks = run_ranks(evaluate, 2, str(tmp_path), True)
    assert single["rows"] == ranks[0]["rows"] == ranks[1]["rows"]
    for name in MODELS:
        first, second = (found[name] for found in ranks)
        assert [len(first), len(second)] == [3, 3] and second[-1][1] == 0
        together = [one for pair in zip(first, second) for one in pair][:RECORDS]
        torch.testing.assert_close(
            torch.tensor(together), torch.tensor(single[name]), rtol=1e-5, atol=1e-5
        )
