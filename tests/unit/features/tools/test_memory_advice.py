"""A Megatron-LM script without memory: one line at the end that says what would help.

`megatron.training` is not in the wheels of megatron-core before 0.19: a small package with its
functions stands in, in a process of its own.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.unit.features.test_argument_hook import VERSIONS

TRAINING = """

def get_model(model_provider_func, model_type=None, wrap_with_ddp=True):
    return model_provider_func()

def setup_model_and_optimizer(model_provider_func, model_type, checkpointing_context=None):
    return model_provider_func()

def train(forward_step_func, model, optimizer, opt_param_scheduler):
    forward_step_func()
"""
ARGUMENTS = """
    for name in ("hidden-size", "seq-length", "micro-batch-size", "ffn-hidden-size", "vocab-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("bf16", "use-distributed-optimizer"):
        parser.add_argument(f"--{name}", action="store_true")
"""
MARK = '    parser.add_argument("--yaml-cfg")\n'
SCRIPT = """
import json, sys, torch
import mindspeed.megatron_adaptor
from megatron.training.initialize import initialize
from megatron.training import training

model = [torch.nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16)]
for flags, text, is_setup in json.loads(sys.stdin.read()):
    def fails(*_):
        raise (torch.OutOfMemoryError if "memory" in text else RuntimeError)(text)
    sys.argv = ["pretrain.py", *flags]
    initialize()
    try:
        if is_setup:
            training.setup_model_and_optimizer(fails, None)
        training.train(fails, model, None, None)
    except RuntimeError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""
SIZES = (
    *("--num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4").split(),
    *("--seq-length 128 --micro-batch-size 2 --vocab-size 1000 --bf16").split(),
)
FULL = "out of memory: 3 GiB\nmore"
CASES = {
    "step": ((), FULL, False),
    "flags in force": (("--swap-optimizer", "--recompute-norm"), FULL, False),
    "model": ((), FULL, True),
    "other error": ((), "something else", False),
    "switched off": (("--no-memory-advice",), FULL, False),
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The kind and the text of the error of each case, which one process runs."""
    root = tmp_path_factory.mktemp("megatron_lm")
    package = root / "megatron" / "training"
    package.mkdir(parents=True)
    files = VERSIONS["0.12-0.16"] | {"training.py": TRAINING, "__init__.py": ""}
    files["arguments.py"] = files["arguments.py"].replace(MARK, MARK + ARGUMENTS)
    for name, text in files.items():
        (package / name).write_text(text)
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    cases = [([*SIZES, *flags], *rest) for flags, *rest in CASES.values()]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(cases),
        env={**os.environ, "PYTHONPATH": path, "MINDSPEED_DEVICE": "cpu", "RANK": "0"},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(CASES), done.stderr
    return dict(zip(CASES, lines))


def test_a_step_without_memory_gets_advice(errors):
    kind, line = errors["step"]
    assert kind == "OutOfMemory"
    assert line.startswith("out of memory: 3 GiB; a rank of this run needs") and "\n" not in line
    # One million parameters in two bytes, and gradients in four.
    assert "(weights 1.9 MiB, gradients 3.8 MiB, optimizer state 11.4 MiB" in line
    assert "what would save most: --swap-optimizer (11.4 MiB), " in line


def test_flags_in_force_and_refused_ones_are_not_advised(errors):
    line = errors["flags in force"][1]
    # Megatron's --recompute-method uniform cannot be beside --recompute-norm.
    assert "optimizer state 0.0 MiB" in line
    assert "--swap-optimizer" not in line and "--recompute-granularity" not in line


def test_a_model_that_does_not_fit_gets_advice(errors):
    # 4 layers of 4 x 64^2 + 2 x 64 x 256, and 1024 rows of 64: 262,144 parameters.
    assert "(weights 0.5 MiB, gradients 1.0 MiB, " in errors["model"][1]


def test_other_errors_and_a_switch(errors):
    assert errors["other error"] == ["RuntimeError", "something else"]
    assert errors["switched off"] == ["OutOfMemoryError", FULL]
