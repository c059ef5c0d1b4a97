"""Half precision on a cpu does not die of an illegal instruction."""

import os
import subprocess
import sys

import torch

from mindspeed.device import cpu

MATMUL = """
import os
import torch
from mindspeed.device.cpu import avoid_trapping_amx
avoid_trapping_amx()
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)  # as in a rank that gets an environment of its own
a = torch.ones(64, 64, dtype=torch.bfloat16)
print((a @ a).sum().item())
"""


def test_a_bf16_matmul_survives_in_a_fresh_process():
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    run = subprocess.run(
        [sys.executable, "-c", MATMUL], env=environment, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout.strip()) == (0, str(64.0**3)), run.stderr


def test_a_limit_of_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    cpu.avoid_trapping_amx()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_a_trap_is_detected_and_a_working_matmul_too(monkeypatch):
    def trap(*_):
        os.kill(os.getpid(), 4)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", trap)
        assert not cpu._bf16_matmul_works()
        patch.setattr(torch, "mm", lambda a, b: a)
        assert cpu._bf16_matmul_works()
