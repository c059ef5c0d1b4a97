"""The training loop of the first document: its tables to the letter, its loop on many ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/first_training_loop/train.py"
LAYER = {
    "input_layernorm.weight": ([12], "float32"),
    "input_layernorm.bias": ([12], "float32"),
    "self_attention.linear_proj.weight": ([12, "12/tp"], "float16"),
    "self_attention.linear_proj.bias": ([12], "float16"),
    "self_attention.linear_qkv.weight": (["36/tp", 12], "float16"),
    "self_attention.linear_qkv.bias": (["36/tp"], "float16"),
    "pre_mlp_layernorm.weight": ([12], "float32"),
    "pre_mlp_layernorm.bias": ([12], "float32"),
    "mlp.linear_fc1.weight": (["48/tp", 12], "float16"),
    "mlp.linear_fc1.bias": (["48/tp"], "float16"),
    "mlp.linear_fc2.weight": ([12, "48/tp"], "float16"),
    "mlp.linear_fc2.bias": ([12], "float16"),
}
TABLE = {
    "embedding.word_embeddings.weight": (["100/tp", 12], "float16"),
    "embedding.position_embeddings.weight": ([64, 12], "float32"),
    **{f"decoder.layers.{i}.{name}": row for i in range(2) for name, row in LAYER.items()},
    "decoder.final_layernorm.weight": ([12], "float32"),
    "decoder.final_layernorm.bias": ([12], "float32"),
    "output_layer.weight": (["100/tp", 12], "float16"),
}
MODULES = [
    "(word_embeddings): VocabParallelEmbedding()",
    "(position_embeddings): Embedding(64, 12)",
    "(embedding_dropout): Dropout(p=0.1, inplace=False)",
    "(0-1): 2 x TransformerLayer(",
    "(input_layernorm): FusedLayerNorm()",
    "(scale_mask_softmax): FusedScaleMaskSoftmax()",
    "(pre_mlp_layernorm): FusedLayerNorm()",
    "(final_layernorm): FusedLayerNorm()",
]


def expected_lines(tp):
    def size(entry):
        return entry if isinstance(entry, int) else int(entry.split("/")[0]) // tp

    for name, (shape, dtype) in TABLE.items():
        yield f"{name}, {[size(entry) for entry in shape]}, torch.{dtype}, cpu"


def run(command, folder):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("ranks, tp, total", [(1, 1, 6960), (4, 2, 3948)])
def test_the_example_prints_the_documents_tables_and_trains(tmp_path, ranks, tp, total):
    flag = f"--tensor-model-parallel-size={tp}"
    if ranks == 1:  # without a launcher
        done = run([sys.executable, SCRIPT, flag], tmp_path)
        code, output = done.returncode, done.stdout
    else:
        code, output = run_command("python", str(SCRIPT), flag, nproc=ranks, folder=tmp_path)
    assert code == 0, output
    lines = output.splitlines()
    table = [line for line in lines if line.endswith(", cpu")]
    assert sorted(table) == sorted(expected_lines(tp))
    assert len(table) == 29 and f"Total parameters: {total}" in lines
    for module in MODULES:
        assert any(module in line for line in lines), module
    assert "get_model made every parameter {'torch.bfloat16'}" in lines
    losses = [float(loss) for loss in re.findall(r"'lm loss': ([\d.]+)", output)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert "'losses per token': [8, 64]" in output
    assert lines[-1] == "Saved to ckpt and loaded back."


def test_pipeline_stages_and_the_launcher_of_our_own(tmp_path):
    command = [sys.executable, "-m", "mindspeed", "run", "--nproc", "2", SCRIPT]
    done = run([*command, "--pipeline-model-parallel-size=2"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'lm loss'") == 5


def test_a_layout_that_cannot_be_built_is_one_line_and_exit_code_2(tmp_path):
    flag = "--tensor-model-parallel-size=4"
    code, output = run_command("python", str(SCRIPT), flag, nproc=2, folder=tmp_path)
    check_refusal(code, output, "multiple of 4 ranks", ranks=2)


@pytest.mark.parametrize(
    "ranks, flag, message",
    [
        (3, "--tensor-model-parallel-size=3", "3 does not divide --num-attention-heads 4"),
        (4, "--pipeline-model-parallel-size=4", "does not divide --num-layers 2: use 1 or 2"),
    ],
)
def test_a_rank_refuses_a_layout_before_it_waits_for_others(tmp_path, ranks, flag, message):
    alone = {"WORLD_SIZE": str(ranks)}
    code, output = run_command("python", str(SCRIPT), flag, folder=tmp_path, variables=alone)
    check_refusal(code, output, message)


def check_refusal(code, output, message, ranks=1):
    """Check for one line a rank; a launcher shows that of the first."""
    assert code == 2
    assert message in output and "Traceback" not in output
    assert output.count("error:") == ranks


@pytest.mark.parametrize("tp", [1, 2])
def test_the_documents_own_loop_trains_a_bare_model(tp):
    """A bare GPTModel with float16 parameters, `torch.optim` and Megatron's schedule."""
    for losses, dtypes in run_ranks(_train_bare_model, tp, tp):
        assert losses[-1] < losses[0]
        assert dtypes == {"torch.float16", "torch.float32"}


def _train_bare_model(tp):
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tp, 1)
    model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float16,
        bf16=True,
        tensor_model_parallel_size=tp,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 100, 64).to(torch.device("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 100, (8, 65), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 64, 64, device="cuda").triu(1).bool()

    def forward_step_func(data_iterator, model):
        positions = torch.arange(64, device="cuda").expand(8, -1)
        output = model(tokens[:, :-1].cuda(), positions, mask, labels=tokens[:, 1:].cuda())
        assert output.shape == (8, 64)
        return output, lambda losses: (losses.float().mean(), {"lm loss": losses.float().mean()})

    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=64,
            micro_batch_size=8,
            decoder_seq_length=64,
            forward_only=False,
        )
        optimizer.step()
        losses.append(reduced[0]["lm loss"].item())
    return losses, {str(parameter.dtype) for parameter in model.parameters()}
