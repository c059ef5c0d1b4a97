"""Damaged processor files produce one-line errors."""

import json
import shutil

import pytest

from mindspeed.config import ConfigError, build
from mindspeed_mm.data.options import ProcessorOptions
from mindspeed_mm.data.processor import MediaProcessor, load_processor
from tests.mm import processors


def change(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def opened(folder):
    options = build(ProcessorOptions, {"model_name_or_path": str(folder)})
    return MediaProcessor(load_processor(options), options)


@pytest.fixture
def folder(data, tmp_path):
    return shutil.copytree(data.root / "qwen2_5_vl", tmp_path / "model")


def test_a_damaged_tokenizer_config(folder):
    change(folder, "tokenizer_config.json", model_max_length=[1])
    with pytest.raises(ConfigError, match="^[^\n]{1,600}$"):
        opened(folder)


def test_a_file_that_is_not_json_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: cannot be read"):
        opened(folder)


def test_a_long_reason_is_truncated(folder):
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no processor") as caught:
        opened(folder)
    assert len(str(caught.value)) < 600


def test_padding_with_the_image_token_raises(folder):
    change(folder, "tokenizer_config.json", pad_token="<|image_pad|>")
    expected = r"model: the pad token '<\|image_pad\|>' of its tokenizer is also the image token"
    with pytest.raises(ConfigError, match=expected):
        opened(folder)


def test_a_processor_that_needs_the_whole_text_is_rejected_for_images(tmp_path):
    processor = processors.paligemma()
    made = MediaProcessor(processor, ProcessorOptions(model_name_or_path=str(tmp_path)))
    with pytest.raises(ConfigError, match="PaliGemmaProcessor computes labels from the whole text"):
        made.check("image")
