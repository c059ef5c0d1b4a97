"""Our own callbacks: data before weights, and what a model refuses of the first batch."""

import argparse
import json
import re

import pytest
import yaml

from mindspeed.compat.stand_ins.megatron_training import global_vars
from mindspeed.config import ConfigError, build
from mindspeed_mm.data import DataConfig
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.training.arguments import Sections
from mindspeed_mm.training.transformers_task import callbacks
from tests.mm import processors
from tests.mm.folder import make_folder

IMAGE = 438
"""The token of an image in the tiny folder."""


def test_a_missing_image_is_an_error_before_weights_are_read(tmp_path, monkeypatch):
    processors.save("qwen2_5_vl", tmp_path)
    said = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Yes."}]
    record = {"conversations": said, "images": ["missing.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(record))
    values = {"basic_parameters": {"dataset": str(tmp_path / "rows.jsonl")}}
    values["preprocess_parameters"] = {"model_name_or_path": str(tmp_path)}
    sections = Sections(
        # There are no weights at all: to build the model would fail.
        model=build(ModelConfig, {"init_from_hf_path": str(tmp_path / "nothing")}),
        data=build(DataConfig, {"dataset_param": values}),
    )
    flags = {"seq_length": None, "micro_batch_size": 1, "num_workers": 0, "seed": 1}
    monkeypatch.setattr(global_vars, "_current", [argparse.Namespace(mm=sections, **flags)])
    with pytest.raises(ConfigError, match="line 1: the image .*missing.png does not exist"):
        callbacks().model()


def begin(folder, monkeypatch):
    """Write all that a run needs; return the callbacks of its task."""
    content = yaml.safe_load(make_folder(folder).read_text())
    sections = Sections(
        model=build(ModelConfig, content["model"]), data=build(DataConfig, content["data"])
    )
    flags = {"seq_length": None, "micro_batch_size": 1, "num_workers": 0, "seed": 1, "load": None}
    flags |= {"init_model_with_meta_device": False, "from_scratch": False}
    flags |= {"untie_embeddings_and_output_weights": False, "consumed_train_samples": 0}
    arguments = argparse.Namespace(mm=sections, **flags)
    monkeypatch.setattr(global_vars, "_current", [arguments])
    return callbacks()


def change_config(folder, **values):
    path = folder / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def batches_of(task):
    with_image = [
        batch for batch in task.datasets((4, 0, 0))[0] if (batch["input_ids"] == IMAGE).any()
    ]
    return iter(with_image)


def test_a_model_that_refuses_the_first_batch_is_named_with_its_processor(tmp_path, monkeypatch):
    task = begin(tmp_path, monkeypatch)
    change_config(tmp_path, image_token_id=IMAGE + 1, video_token_id=IMAGE + 2)
    model = task.model()
    folder = re.escape(str(tmp_path / "model"))
    expected = (
        f"^the model of {folder} cannot compute the first batch that the processor of {folder} "
        r"makes: Image features and image tokens do not match.* \(ValueError, transformers\.models"
        r"\.qwen2_5_vl\.modeling_qwen2_5_vl, line \d+\); the files of both"
    )
    with pytest.raises(ConfigError, match=expected):
        task.loss(batches_of(task), model)


def test_a_model_that_cannot_be_built_is_named_with_its_config(tmp_path, monkeypatch):
    task = begin(tmp_path, monkeypatch)
    text = json.loads((tmp_path / "model/config.json").read_text())["text_config"]
    change_config(tmp_path, text_config=text | {"hidden_size": 0})
    with pytest.raises(ConfigError, match=r"model/config.json: Qwen2_5_VLFor.*ZeroDivisionError"):
        task.model()


def test_what_a_later_batch_raises_keeps_its_traceback(tmp_path, monkeypatch):
    task = begin(tmp_path, monkeypatch)
    model, batches = task.model(), batches_of(task)
    task.loss(batches, model)
    wrong = next(batches)
    wrong["input_ids"][wrong["input_ids"] == IMAGE] = 5
    with pytest.raises(ValueError, match="Image features and image tokens do not match") as raised:
        task.loss(iter([wrong]), model)
    assert not isinstance(raised.value, ConfigError)
