"""Errors of transformers become one line, those of user code keep their traceback."""

import json

import pytest
import torch

from mindspeed.config import ConfigError
from mindspeed_mm.models.meta_device import build_meta_model
from mindspeed_mm.transformers_errors import config_errors, is_transformers_error, with_location
from tests.mm import tiny

MODEL = "transformers.models.some.modeling_some"


def raised(error, *modules):
    """Return an error that was raised in the last of these modules, which call one another."""

    def call():
        raise error

    for module in reversed(modules):
        names = {"__name__": module, "inner": call, "error": error}
        is_last = module is modules[-1]
        exec(f"def run():\n    {'raise error' if is_last else 'inner()'}", names)
        call = names["run"]
    try:
        call()
    except Exception as found:
        found.__traceback__ = found.__traceback__.tb_next  # without this function
        return found


def test_an_error_of_transformers_has_the_line_of_the_model():
    modules = ("mindspeed_mm.models.x", "torch.nn.x", MODEL, "transformers.utils", "contextlib")
    error = raised(IndexError("out of\nrange"), *modules)
    assert is_transformers_error(error)
    assert with_location(error) == f"out of range (IndexError, {MODEL}, line 2)"
    assert is_transformers_error(raised(RuntimeError(), MODEL, "torch.nn.functional"))
    assert is_transformers_error(raised(RuntimeError(), MODEL, "mindspeed.device.facade.tensors"))
    error = raised(ZeroDivisionError("x" * 1000), "transformers.configuration_utils")
    assert len(with_location(error)) < 400 and "transformers.configuration_utils" in with_location(
        error
    )


@pytest.mark.parametrize(
    "modules",
    [
        ("my_model", MODEL),
        (MODEL, "my_layer"),
        ("transformers_modules.downloaded.modeling", "torch.nn"),
        ("torch.nn",),
        (MODEL, "mindspeed.ops.swiglu.reference"),
        (MODEL, "torch.nn.modules.module", "torch.distributed.fsdp.x"),
    ],
)
def test_other_errors_keep_their_traceback(modules):
    assert not is_transformers_error(raised(RuntimeError(), *modules))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), MemoryError(), ConfigError("x")])
def test_errors_unrelated_to_the_files_keep_their_traceback(error):
    assert not is_transformers_error(raised(error, MODEL))


def test_a_config_with_a_size_of_zero_is_one_line(tmp_path):
    folder = tiny.save("qwen2_5_vl", tmp_path / "model")
    path = tmp_path / "model/config.json"
    values = json.loads(path.read_text())
    values["text_config"]["hidden_size"] = 0
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"config.json: .*\(ZeroDivisionError, transformers\."):
        build_meta_model(str(folder))


def test_user_code_keeps_its_errors():
    with pytest.raises(ZeroDivisionError), config_errors("config.json"):
        print(1 / 0)
