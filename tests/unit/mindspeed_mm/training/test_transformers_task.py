"""Our own callbacks: the data is looked at before the weights are."""

import argparse
import json

import pytest

from mindspeed.compat import run_arguments
from mindspeed.config import ConfigError, build
from mindspeed_mm.data import DataConfig
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.training.sections import Sections
from mindspeed_mm.training.transformers_task import callbacks
from tests.mm import processors


def test_a_missing_image_is_told_before_weights_are_read(tmp_path, monkeypatch):
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
    monkeypatch.setattr(run_arguments, "_found", [argparse.Namespace(mm=sections, **flags)])
    with pytest.raises(ConfigError, match="line 1: the image .*missing.png does not exist"):
        callbacks().model()
