"""With --npu-deterministic, two runs and a resumed run give the same bits on the GPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.data.indexed import TokenWriter
from tests.gpu.launched import last_lines

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


LENGTH, VOCABULARY = 2048, 4096
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "rope_theta": 1e6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


@pytest.mark.gpu
def test_a_command_that_trains_experts_repeats_its_bits(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    writer = TokenWriter(tmp_path, "text_document", np.dtype("<i4"))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 40 * LENGTH)
    writer.append(tokens, np.array([len(tokens)]), np.array([1]))
    writer.build_index(tmp_path / "text_document.idx")
    writer.close()
    flags = ["--hf-cfg-dir", tmp_path, "--data-path", tmp_path / "text_document", "--from-scratch"]
    flags += ["--bf16", "--seq-length", LENGTH, "--micro-batch-size", 2, "--global-batch-size", 4]
    flags += ["--train-iters", STEPS, "--lr", 1e-3, "--npu-deterministic"]
    first, second = (train(tmp_path / f"log{number}.jsonl", flags) for number in range(2))
    assert first == second and len(first) == STEPS
    assert first[-1]["lm loss"] != first[0]["lm loss"]


def train(log, flags):
    """Pretrain, and return the loss and the norm of the gradients of each step."""
    command = [sys.executable, ROOT / "pretrain_gpt.py", *flags, "--log-file", log]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    names = ("lm loss", "grad norm")
    return [{name: step[name] for name in names} for step in steps if "lm loss" in step]
