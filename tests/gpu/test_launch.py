"""The launcher with the GPU's own backend: it works on loopback, and listens nowhere else."""

from pathlib import Path

import pytest

from tests.gpu.launched import last_lines

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
    (line,) = last_lines(tmp_path, _SCRIPT)
    assert line == "nccl [1.0, 1.0, 1.0] ['127.0.0.1']"
