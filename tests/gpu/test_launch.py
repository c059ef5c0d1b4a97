"""The launcher with the GPU's own backend: it works on loopback, and listens nowhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = """
import torch
from mindspeed import device
from tests.sockets import listening_addresses

chosen = device.current()
torch.distributed.init_process_group(chosen.backend)
total = torch.ones(3, device=chosen.torch_device)
torch.distributed.all_reduce(total)
addresses = sorted({address for address, _ in listening_addresses()})
print(chosen.backend, total.tolist(), addresses)
torch.distributed.destroy_process_group()
"""


@pytest.mark.gpu
def test_the_gpu_backend_stays_on_loopback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{_SCRIPT}")
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed", "run", "--timeout", "120", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "nccl [1.0, 1.0, 1.0] ['127.0.0.1']"
