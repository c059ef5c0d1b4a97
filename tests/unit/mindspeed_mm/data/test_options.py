"""The page of data.json documents every option, and its example is valid."""

import json
import re
from pathlib import Path

import pytest

from mindspeed.config import ConfigError, build
from mindspeed_mm.data import options

PAGE = (Path(__file__).parents[4] / "docs/mm/data.md").read_text()
SECTIONS = (
    options.AttrOptions,
    options.BasicOptions,
    options.ProcessorOptions,
    options.DatasetOptions,
    options.CollateOptions,
    options.DataloaderOptions,
)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page(section):
    for name in section.model_fields:
        named = rf"`{name}`|^### {name}:"
        assert re.search(named, PAGE, re.MULTILINE), name


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("ProcessorOptions", {"image_min_pixels": 10**12}, "less than or equal to 67108864"),
        ("ProcessorOptions", {"video_min_pixels": 10**12}, "less than or equal to 67108864"),
        ("ProcessorOptions", {"video_fps": float("inf")}, "less than or equal to 1000"),
        ("CollateOptions", {"pad_to_multiple_of": 10**12}, "less than or equal to 16777216"),
        ("DataloaderOptions", {"batch_size": 10**9}, "less than or equal to 1048576"),
        ("DataloaderOptions", {"num_workers": 10**6}, "less than or equal to 1024"),
    ],
)
def test_absurd_sizes_are_errors_before_memory_is_spent(section, values, message):
    needed = {"model_name_or_path": "m"} if section == "ProcessorOptions" else {}
    with pytest.raises(ConfigError, match=message):
        build(getattr(options, section), needed | values)


def test_an_entry_left_empty_is_the_default():
    empty = build(options.BasicOptions, {"template": None, "dataset": None, "val_rate": None})
    assert empty == options.BasicOptions()
    attr = build(options.AttrOptions, {"role_tag": None, "observation_tag": None})
    assert (attr.role_tag, attr.observation_tag) == ("from", None), "null is allowed for the latter"
    with pytest.raises(ConfigError, match="model_name_or_path is missing"):
        build(options.ProcessorOptions, {"model_name_or_path": None})


def test_the_example_is_valid():
    example = re.search(r"```json\n(\{\n.*?)```", PAGE, re.DOTALL)
    config = build(options.DataConfig, json.loads(example[1]))
    assert config.dataset_param.basic_parameters.dataset == ("./data/a.json", "./data/b.json")
