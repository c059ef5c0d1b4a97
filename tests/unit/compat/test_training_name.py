"""`from megatron.training import get_args` works in a script that imports only a suite."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import {suite}
from megatron.training import get_args
from megatron.training.global_vars import get_args as of_the_globals
assert get_args is of_the_globals
assert "megatron.core" not in sys.modules and "torch" not in sys.modules
try:
    get_args()
except RuntimeError as error:
    print(error)
import megatron.training
try:
    megatron.training.print_rank_0
except AttributeError as error:
    print(error)
"""


@pytest.mark.parametrize("suite", ["mindspeed_llm", "mindspeed_mm"])
def test_a_script_without_the_adaptor_gets_the_arguments(suite):
    script = [sys.executable, "-c", SCRIPT.format(suite=suite)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "there are no arguments yet: they are there once a run has started",
        "megatron.training is not installed and its stand-in has no print_rank_0, only get_args "
        "and get_model: put a checkout of Megatron-LM on PYTHONPATH",
    ], done.stderr


def test_a_real_package_is_left_alone(tmp_path):
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("get_args = 'of Megatron-LM'\n")
    script = "import mindspeed_mm\nfrom megatron.training import get_args\nprint(get_args)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.strip() == "of Megatron-LM", done.stderr
