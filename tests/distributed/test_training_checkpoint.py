"""Checkpoints that Megatron itself writes, torch_dist or one file a rank, become HF models."""

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed.checkpoint.detection import detect
from mindspeed_llm.checkpoint import ConvertOptions
from tests.llm import tiny
from tests.llm.megatron_logits import all_logits, loaded_model
from tests.ranks import run_ranks


def save_torch_dist(source, target, layout):
    """Save the model as Megatron's training does, with something of an optimizer beside it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    (model,), _ = loaded_model(source, source, **layout)
    folder = Path(target) / "iter_0000012"
    folder.mkdir(parents=True, exist_ok=True)
    state = dict(model.sharded_state_dict())
    moment = torch.zeros(4)
    state["optimizer"] = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.w", moment)
    state["optimizer"].replica_id = torch.distributed.get_rank()
    state["args"] = argparse.Namespace(num_layers=4)
    dist_checkpointing.save(state, folder)
    if torch.distributed.get_rank() == 0:
        (Path(target) / "latest_checkpointed_iteration.txt").write_text("12")


def save_rank_files(source, target, layout):
    """Save the model as Megatron's `--ckpt-format torch` does: no layout entry, but arguments."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnBackend

    models, _ = loaded_model(source, source, **layout)
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if layout.get("pp", 1) > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if layout.get("ep", 1) > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    keys = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    arguments = argparse.Namespace(num_layers=4, attention_backend=AttnBackend.flash)
    values = {key: model.state_dict() for key, model in zip(keys, models)}
    values |= {"args": arguments, "iteration": 12, "checkpoint_version": 3.0}
    folder = Path(target) / "iter_0000012" / name
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(values, folder / "model_optim_rng.pt")
    if torch.distributed.get_rank() == 0:
        (Path(target) / "latest_checkpointed_iteration.txt").write_text("12")


def check_export(checkpoint, model, target):
    from mindspeed_llm.checkpoint.conversion import convert

    options = {"load_model_type": "mg", "save_model_type": "hf", "hf_cfg_dir": str(model)}
    convert(ConvertOptions(load_dir=str(checkpoint), save_dir=str(target), **options))
    found, expected = (
        load_file(target / "model.safetensors"),
        load_file(model / "model.safetensors"),
    )
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize(
    "name, layout",
    [
        ("llama_tied", {"tp": 2, "pp": 2}),
        ("qwen2", {"tp": 2}),
        ("qwen3_moe", {"ep": 2}),
        ("deepseek3", {"pp": 2}),
    ],
    ids=str,
)
def test_torch_dist(tmp_path, name, layout, impl):
    model = tiny.save(name, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    world = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("ep", 1)
    run_ranks(save_torch_dist, world, str(model), str(checkpoint), layout | {"impl": impl})
    assert detect(checkpoint).kind == "torch_dist"
    check_export(checkpoint, model, tmp_path / "hf")
    case = {"source": str(checkpoint), "config_folder": str(model), "impl": impl}
    ((output,),) = run_ranks(all_logits, 1, [case])
    assert (output - tiny.logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "name, layout",
    [
        ("llama_tied", {"tp": 2, "pp": 2}),
        ("qwen2", {"pp": 2, "layers_per_chunk": 1}),
        ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1, "impl": "transformer_engine"}),
        ("deepseek3", {"tp": 2, "impl": "transformer_engine"}),
        ("qwen3", {"tp": 2}),
        ("mixtral", {"tp": 2, "ep": 2, "etp": 1}),
        ("deepseek2", {"pp": 2}),
    ],
    ids=str,
)
def test_rank_files(tmp_path, name, layout):
    """The layout is seen in the files; arguments with Megatron's own classes do no harm."""
    model = tiny.save(name, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    world = layout.get("tp", 1) * layout.get("pp", 1)
    run_ranks(save_rank_files, world, str(model), str(checkpoint), layout)
    check_export(checkpoint, model, tmp_path / "hf")
