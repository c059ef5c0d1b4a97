"""Kernels that processes compile are those that the trials of the packages load."""

import pytest

from mindspeed.device import hopper
from tests.gpu.launched import last_lines

pytestmark = pytest.mark.gpu
SCRIPT = """
import os
import sys
from pathlib import Path

import torch

folder = Path(sys.argv[1])
os.environ["XDG_CACHE_HOME"] = str(folder)
from mindspeed.device.hopper import FLASH_ATTENTION, QUACK
from mindspeed.device.precompile import claimed
from mindspeed.ops.fusion_attention import flash4
from mindspeed.ops.swiglu import gemm_swiglu

for package in (FLASH_ATTENTION, QUACK):
    for name in package.cached:  # those that this process inherits are the folders of another
        os.environ.pop(name, None)
gemm_swiglu.prepare(torch.bfloat16, 512)
flash4.prepare(torch.bfloat16, 4, 2, 128)
heads = flash4._Heads(torch.bfloat16, 4, 2, 128, is_causal=True, is_packed=False)
files = QUACK._files(gemm_swiglu._trial_kernels(torch.bfloat16, gemm_swiglu.TILES_N[0]))
files += FLASH_ATTENTION._files(heads.kernels())
for kernel, file in files:
    with claimed(file) as lock:
        assert lock is None, f"the process of {kernel.arguments} failed"
compiled = set(folder.rglob("*.o"))
x, weight = (torch.randn(size, 512, device="cuda", dtype=torch.bfloat16) for size in (2048, 1024))
q, k = (torch.randn(1, n, 2048, 128, device="cuda", dtype=torch.bfloat16) for n in (4, 2))
assert gemm_swiglu.is_supported(x, weight) and flash4.supports(q, k, k, True, 0.0)
print(len(compiled), len(set(folder.rglob("*.o")) - compiled))
"""


def test_trials_compile_nothing_that_processes_have_compiled(tmp_path):
    for package in (hopper.QUACK, hopper.FLASH_ATTENTION):
        if not package.is_here():
            pytest.skip(f"needs a Hopper GPU and {package.name}")
    compiled, others = map(int, last_lines(tmp_path, SCRIPT, tmp_path / "cache")[-1].split())
    assert compiled >= 6 and others == 0
