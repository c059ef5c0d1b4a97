"""Half precision on a cpu does not die of an illegal instruction."""

import os
import subprocess
import sys

import torch

from mindspeed.device import amx

PRODUCT = """
import os
import torch
from mindspeed.device.amx import avoid_trapping_amx
avoid_trapping_amx()
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)  # as in a rank that gets an environment of its own
a = torch.ones(64, 64, dtype=torch.bfloat16)
print((a @ a).sum().item())
"""


def test_a_bf16_product_survives_in_a_fresh_process():
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    run = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout.strip()) == (0, str(64.0**3)), run.stderr


def test_a_choice_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    amx.avoid_trapping_amx()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_a_trap_is_seen_and_a_working_product_too(monkeypatch):
    def trap(*_):
        os.kill(os.getpid(), 4)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", trap)
        assert not amx._bf16_product_works()
        patch.setattr(torch, "mm", lambda a, b: a)
        assert amx._bf16_product_works()
