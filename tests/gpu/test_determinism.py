"""With --npu-deterministic, two runs and a resumed run give the same bits on the GPU."""

import pytest

from tests.gpu.launched import last_lines

STEPS = 6
SCRIPT = """
import sys
from pathlib import Path

import torch

import mindspeed.megatron_adaptor
from mindspeed import device
from tests.distributed.test_determinism import _train
from tests.gpt.layout import Layout
from tests.gpt.training import Training

torch.distributed.init_process_group(device.current().backend)
layout = Layout(dropout=0.1, bf16=sys.argv[1] == "te", spec=sys.argv[1])
losses, weights = _train(Training(layout), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
print(losses, weights, sep="\\n")
torch.distributed.destroy_process_group()
"""


def run(spec, folder, first, last):
    losses, weights = last_lines(folder, SCRIPT, spec, folder, first, last, lines=2)
    return [float(loss) for loss in losses.strip("[]").split(",")], weights


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["local", "te"])
def test_runs_and_resumed_runs_are_bitwise_equal(spec, tmp_path):
    losses, weights = run(spec, tmp_path, 0, STEPS)
    assert run(spec, tmp_path, 0, STEPS) == (losses, weights)
    start, _ = run(spec, tmp_path, 0, STEPS // 2)
    rest, resumed_weights = run(spec, tmp_path, STEPS // 2, STEPS)
    assert start + rest == losses and resumed_weights == weights
