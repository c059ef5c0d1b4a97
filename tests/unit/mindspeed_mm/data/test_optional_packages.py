"""Videos without their optional packages: one line with the pip command."""

import importlib.metadata
import json
import sys

import pytest

from mindspeed.config import ConfigError
from mindspeed_mm.optional_packages import install_command, torchvision_problem
from tests.mm import processors

TORCH = importlib.metadata.version("torch")
VIDEO = {
    "conversations": [{"from": "human", "value": "<video>"}, {"from": "gpt", "value": "Yes."}],
    "videos": ["a.gif"],
}


@pytest.mark.parametrize("build", ["", "+cpu"])
def test_the_installed_torch_is_pinned(build, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"2.13.0{build}")
    command, _, rest = install_command().partition(" --extra-index-url ")
    assert command == "pip install av torchvision torch==2.13.0"
    assert rest == (f"(the index of torch 2.13.0{build})" if build else "")


@pytest.mark.parametrize("workers", [0, 1])
def test_videos_without_torchvision(data, monkeypatch, workers):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    (data.root / "a.gif").write_bytes(b"")
    with pytest.raises(ConfigError) as error:
        data.open([VIDEO], basic={"preprocessing_num_workers": workers})
    expected = f"the data has videos, but torchvision is not installed: {install_command()}"
    assert str(error.value) == expected


def test_a_torchvision_for_another_torch(data, monkeypatch, tmp_path):
    """With such a build, transformers silently loses its image classes."""
    (tmp_path / "torchvision").mkdir()
    source = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision/__init__.py").write_text(source)
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info/METADATA").write_text("Version: 0.28.0")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    problem = f"torchvision 0.28.0 does not load with torch {TORCH} (operator"
    assert torchvision_problem().startswith(problem)
    processors.save("qwen2_5_vl", tmp_path / "model")
    with pytest.raises(ConfigError) as error:
        data.open([VIDEO], more={"model_name_or_path": str(tmp_path / "model")})
    assert str(error.value).startswith(problem) and install_command() in str(error.value)


def test_a_processor_that_does_not_load_without_torchvision(data, monkeypatch, tmp_path):
    """That of SmolVLM needs its video processor even for images."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    processors.save("qwen2_5_vl", tmp_path)
    for name in ("processor_config.json", "preprocessor_config.json"):
        values = {
            "processor_class": "SmolVLMProcessor",
            "image_processor_type": "SmolVLMImageProcessor",
        }
        (tmp_path / name).write_text(json.dumps(values | {"image_seq_len": 64}))
    with pytest.raises(ConfigError) as error:
        data.open([VIDEO], more={"model_name_or_path": str(tmp_path)})
    assert str(error.value) == (
        f"model_name_or_path {tmp_path}: its SmolVLMProcessor does not load without torchvision, "
        f"not even for images, and torchvision is not installed: {install_command()}"
    )
