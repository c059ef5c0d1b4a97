"""Which errors become one line: those of transformers, not those of code that a user brings."""

import json

import pytest
import torch

from mindspeed.config import ConfigError
from mindspeed_mm.models.skeleton import build_skeleton
from mindspeed_mm.refusals import explained, is_of_transformers, located
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


def test_an_error_of_transformers_is_given_with_the_line_of_the_model():
    modules = ("mindspeed_mm.models.x", "torch.nn.x", MODEL, "transformers.utils", "contextlib")
    error = raised(IndexError("out of\nrange"), *modules)
    assert is_of_transformers(error)
    assert located(error) == f"out of range (IndexError, {MODEL}, line 2)"
    assert is_of_transformers(raised(RuntimeError(), MODEL, "torch.nn.functional"))
    assert is_of_transformers(raised(RuntimeError(), MODEL, "mindspeed.device.facade.tensors"))
    error = raised(ZeroDivisionError("x" * 1000), "transformers.configuration_utils")
    assert len(located(error)) < 400 and "transformers.configuration_utils" in located(error)


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
    assert not is_of_transformers(raised(RuntimeError(), *modules))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), MemoryError(), ConfigError("x")])
def test_so_do_those_that_say_nothing_of_the_files(error):
    assert not is_of_transformers(raised(error, MODEL))


def test_a_config_with_a_size_of_zero_is_one_line(tmp_path):
    folder = tiny.save("qwen2_5_vl", tmp_path / "model")
    path = tmp_path / "model/config.json"
    values = json.loads(path.read_text())
    values["text_config"]["hidden_size"] = 0
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"config.json: .*\(ZeroDivisionError, transformers\."):
        build_skeleton(str(folder))


def test_code_of_a_user_keeps_errors_that_no_config_causes():
    with pytest.raises(ZeroDivisionError), explained("config.json"):
        print(1 / 0)
