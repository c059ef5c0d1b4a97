"""The commands that users type run fused: no large unfused operator in a step of theirs.

A model that a test builds would not show that an option of a command leaves a fusion off.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from commands.peers import path_with_make  # noqa: E402

from mindspeed_llm.data.indexed import TokenWriter  # noqa: E402
from tests.unit.mindspeed_llm.training.tiny_run import write_samples  # noqa: E402

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
LENGTH, HIDDEN, VOCABULARY = 2048, 512, 4096
UNFUSED = {
    "activation": ("silu", "silu_", "silu_backward", "sigmoid", "gelu", "gelu_backward"),
    "norm": ("rsqrt", "pow", "mean", "native_layer_norm", "rms_norm"),
    "rotary embedding": ("neg", "cat", "cos", "sin"),
    "cross entropy": ("exp", "exp_", "log", "_log_softmax", "nll_loss_forward"),
    "attention": ("_softmax", "softmax", "masked_fill", "masked_fill_", "bmm", "baddbmm"),
    "residual": ("add", "native_dropout"),
    "embedding": ("embedding_dense_backward",),
    "optimizer": ("addcdiv_", "addcmul_", "sqrt", "lerp_", "_foreach_lerp_", "_foreach_addcdiv_"),
}
DENSE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "tie_word_embeddings": False,
}
TRAIN = ["--from-scratch", "--bf16", "--micro-batch-size", "2", "--global-batch-size", "4"]
TRAIN += ["--train-iters", "4", "--lr", "1e-4"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Write two models without weights, documents, and conversations in two forms."""
    folder, generator = tmp_path_factory.mktemp("inputs"), np.random.default_rng(0)
    for name, config in (("dense", DENSE), ("moe", MOE)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    writer = TokenWriter(folder, "text_document", np.dtype("<i4"))
    tokens = generator.integers(0, VOCABULARY, 40 * LENGTH)
    writer.append(tokens, np.array([len(tokens)]), np.array([1]))
    writer.build_index(folder / "text_document.idx")
    writer.close()
    lengths = generator.integers(1400, LENGTH, 24)
    ids = [generator.integers(0, VOCABULARY, length) for length in lengths]
    write_samples(folder / "sft", [(one, one.copy()) for one in ids])
    halves = [one[: LENGTH // 2 - 4] for one in ids]
    rows = [[number, number + 1] for number in range(0, len(halves), 2)] * 2
    write_samples(folder / "packed", [(one, one.copy()) for one in halves], rows)
    return folder


COMMANDS = {
    "pretrain": ("dense", "pretrain_gpt.py", "text_document", []),
    "pretrain moe": ("moe", "pretrain_gpt.py", "text_document", []),
    "sft padded": ("dense", "posttrain_gpt.py", "sft", ["--stage", "sft"]),
    "sft variable": (
        "dense",
        "posttrain_gpt.py",
        "sft",
        ["--stage", "sft", "--variable-seq-lengths"],
    ),
    "sft packed": ("dense", "posttrain_gpt.py", "packed", ["--stage", "sft", "--neat-pack"]),
    "lora": ("dense", "posttrain_gpt.py", "sft", ["--stage", "sft", "--lora-r", "16"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_our_commands_are_fused(inputs, tmp_path, name):
    model, script, data, flags = COMMANDS[name]
    if script == "pretrain_gpt.py" or "--variable-seq-lengths" not in flags:
        flags = [*flags, "--seq-length", str(LENGTH)]
    where = ["--hf-cfg-dir", inputs / model, "--data-path", inputs / data]
    # Adapters add to frozen GEMMs; the gradients of a router and of its experts are summed.
    allowed = {"add"} if name in ("lora", "pretrain moe") else set()
    check(tmp_path, ROOT / script, [*TRAIN, *where, *flags], allowed)


CHECKOUTS = {"0.16.1": "MEGATRON_LM", "0.12.1": "MEGATRON_LM_0_12"}
"""Variables that name a folder with Megatron-LM's scripts of a release, each with its core unless
that is installed."""
SCRIPT = {"num-layers": 4, "hidden-size": HIDDEN, "ffn-hidden-size": 1024, "lr": 1e-4}
SCRIPT |= {"num-attention-heads": 4, "num-query-groups": 2, "seq-length": LENGTH}
SCRIPT |= {"max-position-embeddings": LENGTH, "micro-batch-size": 2, "global-batch-size": 4}
SCRIPT |= {"train-iters": 4, "eval-iters": 0, "eval-interval": 4, "vocab-size": VOCABULARY - 1}
SCRIPT |= {"tokenizer-type": "NullTokenizer", "normalization": "RMSNorm"}
SCRIPT |= {"position-embedding-type": "rope", "attention-dropout": 0, "hidden-dropout": 0}
SWITCHES = ("group-query-attention", "swiglu", "bf16", "mock-data", "disable-bias-linear")
# An expert gets half of the tokens: its activations are among the large tensors.
EXPERTS = {"num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 1024}


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("release", CHECKOUTS)
def test_megatrons_own_script_is_fused(tmp_path, release, model):
    folder = os.environ.get(CHECKOUTS[release])
    if not folder:
        pytest.skip(f"{CHECKOUTS[release]} is no folder with Megatron-LM's scripts of {release}")
    options = SCRIPT | (EXPERTS if model == "moe" else {})
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    flags += [f"--{name}" for name in SWITCHES]
    # The gradients of a router and of its experts are summed, and Megatron joins their outputs.
    allowed = {"add", "cat"} if model == "moe" else set()
    environment = {"PYTHONPATH": folder, "PATH": path_with_make(tmp_path)}
    check(tmp_path, Path(folder) / "pretrain_gpt.py", flags, allowed, environment)


def check(folder, script, arguments, allowed, environment=None):
    """Run a command, and compare what its third step called."""
    out = folder / "operators.json"
    command = [sys.executable, "-m", "tests.gpu.profiled", out, LENGTH * HIDDEN, script, *arguments]
    environment = environment or {}
    folders = environment.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ranks |= {"MASTER_PORT": port, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment = os.environ | ranks | environment
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = json.loads(out.read_text())
    assert any("embedding" in name or "mm" in name for name in calls)
    found = {
        (kind, name): calls[f"aten::{name}"]
        for kind, names in UNFUSED.items()
        for name in names
        if f"aten::{name}" in calls and name not in allowed
    }
    assert not found
