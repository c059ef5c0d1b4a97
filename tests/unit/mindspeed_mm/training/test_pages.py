"""The page of every flag knows every flag, and the files in configs are valid."""

import re
from pathlib import Path

import pytest

from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.checkpoint import ConvertOptions
from mindspeed_mm.models.options import ImageEncoderConfig, LoraConfig, LossConfig, ModelConfig
from mindspeed_mm.training.arguments import parse
from mindspeed_mm.training.options import MmOptions
from mindspeed_mm.training.profile import TraceOptions

ROOT = Path(__file__).resolve().parents[4]
CONFIGS = sorted((ROOT / "configs/mindspeed_mm").glob("*/*.yaml"))


def test_the_page_names_every_flag_and_no_other():
    page = (ROOT / "docs/mm/yaml.md").read_text()
    words = set(re.findall(r"[a-z][a-z0-9_]+", page.replace("-", "_")))
    fields = {*MmOptions.model_fields, *TraceOptions.model_fields}
    assert fields <= words, sorted(fields - words)
    rows = re.findall(r"^\| ((?:`\w+`(?:, | or )?)+) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    entries = {"model", "data", "fsdp2_config", "tool", "training", "gpt_args"}
    assert named - entries <= fields, sorted(named - entries - fields)


PAGES = {
    "docs/features/fsdp2.md": (FsdpOptions,),
    "docs/mm/models.md": (ModelConfig, LossConfig, LoraConfig, ImageEncoderConfig),
    "docs/mm/convert.md": (ConvertOptions,),
}


@pytest.mark.parametrize("page", PAGES)
def test_other_pages_name_every_key(page):
    words = set(re.findall(r"[a-z][a-z0-9_]*", (ROOT / page).read_text().replace("-", "_")))
    fields = {name for options in PAGES[page] for name in options.model_fields}
    assert fields <= words, sorted(fields - words)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name + "/" + path.name)
def test_a_config_is_valid(path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    run = parse([str(path), "--save", "out"])
    assert run.mm.model.init_from_hf_path and run.mm.data is not None
    assert run.fsdp.mesh_shape(8) == (1, 8)
