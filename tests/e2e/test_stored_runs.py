"""Checkpoints, data and configs written by an earlier version load and resume as they did then."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.commands import ROOT, run_command
from tests.unit.mindspeed_llm.training.tiny_run import read_checkpoint, read_losses

STORED = ROOT / "tests/assets/stored_runs"
LLM_LOSSES = [4.610125541687012, 4.570518493652344]
"""Of iterations 3 and 4, resumed by the version that wrote the checkpoints; the second one depends
on the restored optimizer state."""
MM_LOSSES = [6.883162975311279, 66.75894927978516]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return shutil.copytree(STORED, tmp_path / "stored")


def run(folder: Path, *command: str) -> str:
    code, output = run_command("python", *command, folder=folder)
    assert code == 0, output
    return output


def test_a_fine_tuning_resumes(stored: Path) -> None:
    before = read_checkpoint(stored / "llm/saved")
    flags = "--load hf --data-path data --lr 1e-3 --lr-decay-style constant --global-batch-size 4"
    flags += " --save saved --use-distributed-optimizer --train-iters 4"
    run(stored / "llm", "posttrain_gpt.py", *flags.split())
    losses = read_losses(str(stored / "llm/saved/log.jsonl"))
    assert len(losses) == 4 and losses[2:] == pytest.approx(LLM_LOSSES, rel=1e-6)
    after = read_checkpoint(stored / "llm/saved")
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}


def test_a_stored_checkpoint_exports_bit_for_bit(stored: Path) -> None:
    from safetensors.torch import load_file

    flags = "--load-model-type mg --save-model-type hf --load-dir saved --save-dir out"
    run(stored / "llm", "convert_ckpt.py", *flags.split())
    exported = load_file(stored / "llm/out/model.safetensors")
    kept = read_checkpoint(stored / "llm/saved")
    embedding = kept["embedding.word_embeddings.weight"][:99]
    assert torch.equal(exported["model.embed_tokens.weight"], embedding)
    down = kept["decoder.layers.mlp.linear_fc2.weight"]
    for layer in range(2):
        assert torch.equal(exported[f"model.layers.{layer}.mlp.down_proj.weight"], down[layer])


def test_a_stored_config_still_runs(stored: Path) -> None:
    shutil.rmtree(stored / "llm/saved/iter_0000002")
    (stored / "llm/saved/latest_checkpointed_iteration.txt").unlink()
    config = shutil.move(stored / "llm/saved/config.yaml", stored / "llm/config.yaml")
    shutil.rmtree(stored / "llm/saved")
    run(stored / "llm", "posttrain_gpt.py", "--config", str(config))
    kept = read_losses(str(STORED / "llm/saved/log.jsonl"))
    found = read_losses(str(stored / "llm/saved/log.jsonl"))
    assert found == pytest.approx(kept, rel=1e-6)


def test_a_sharded_model_resumes(stored: Path) -> None:
    flags = "--fsdp2-config-path fsdp2_config.yaml --lr 1e-3 --save saved --train-iters 4"
    output = run(stored / "mm", "train.py", *flags.split())
    losses = read_losses(str(stored / "mm/saved/log.jsonl"), "loss")
    assert len(losses) == 4 and losses[2:] == pytest.approx(MM_LOSSES, rel=1e-6), output
