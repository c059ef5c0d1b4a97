"""With --npu-deterministic, two runs and a resumed run give the same bits on the GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    script = folder / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}")
    command = [sys.executable, "-m", "mindspeed", "run", "--timeout", "120", str(script)]
    done = subprocess.run(
        [*command, spec, str(folder), str(first), str(last)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses, weights = done.stdout.splitlines()[-2:]
    return [float(loss) for loss in losses.strip("[]").split(",")], weights


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["local", "te"])
def test_runs_and_resumed_runs_are_bitwise_equal(spec, tmp_path):
    losses, weights = run(spec, tmp_path, 0, STEPS)
    assert run(spec, tmp_path, 0, STEPS) == (losses, weights)
    start, _ = run(spec, tmp_path, 0, STEPS // 2)
    rest, resumed_weights = run(spec, tmp_path, STEPS // 2, STEPS)
    assert start + rest == losses and resumed_weights == weights
