"""A folder for `mindspeed-mm train`: model, processor, images, one YAML file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from tests.mm import processors

RECORDS = 12
"""Every third one has no image."""


def make_folder(root: Path, name: str = "qwen2_5_vl", **flags: Any) -> Path:
    """Write a tiny model, records with images and the file of a run; return the file."""
    processors.save(name, root / "model")
    processors.new_model(name).save_pretrained(root / "model")
    make_records(root)
    processor = {"model_name_or_path": str(root / "model")}
    records = {"dataset": str(root / "data.json"), "val_rate": 0.25}
    content = {
        "model": {"init_from_hf_path": str(root / "model")},
        "data": {
            "dataset_param": {"preprocess_parameters": processor, "basic_parameters": records}
        },
        "fsdp2_config": {
            "sharding_size": "auto",
            "sub_modules_to_wrap": ["model.language_model.layers.{*}"],
        },
        "training": {"lr": 1e-3, "global_batch_size": 4, "save": str(root / "saved")} | flags,
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def make_records(root: Path) -> None:
    """Write conversations, most of them about an image."""
    generator = np.random.default_rng(0)
    records = []
    for number in range(RECORDS):
        question, answer = f"what is {number}?", "a thing " * (number % 4 + 1)
        record: dict[str, Any] = {}
        if number % 3:
            pixels = generator.integers(0, 255, (24, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"{number}.png")
            question, record["images"] = f"<image>{question}", [f"{number}.png"]
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        records.append(record | {"conversations": turns})
    (root / "data.json").write_text(json.dumps(records))
