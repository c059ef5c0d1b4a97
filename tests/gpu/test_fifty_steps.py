"""Fifty steps of level 2 are fifty steps of level 0 within the noise of bfloat16, on the GPU."""

import json

import pytest

from tests.gpu.launched import last_lines

pytestmark = pytest.mark.gpu
SCRIPT = """
import json
import sys

import torch

import mindspeed.megatron_adaptor
from mindspeed import device
from tests.distributed.test_fifty_steps import train
from tests.gpt.layout import Layout

torch.distributed.init_process_group(device.current().backend)
losses, on = train(Layout("llama", bf16=True, spec=sys.argv[1]), int(sys.argv[2]))
print(json.dumps([losses, sorted(on)]))
torch.distributed.destroy_process_group()
"""


def run(folder, spec, level):
    (line,) = last_lines(folder, SCRIPT, spec, level)
    return json.loads(line)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_level_two_equals_level_zero(spec, tmp_path):
    plain, none = run(tmp_path, spec, 0)
    fused, on = run(tmp_path, spec, 2)
    assert none == [] and {"fused_swiglu", "linear_cross_entropy"} <= set(on)
    assert plain[-1] < 0.8 * plain[0]
    # A bfloat16 has eight bits; the first step knows no other noise, later ones add to it.
    assert fused[0] == pytest.approx(plain[0], rel=2**-8)
    assert fused == pytest.approx(plain, rel=2**-6)
    assert sum(fused) == pytest.approx(sum(plain), rel=2**-9)
