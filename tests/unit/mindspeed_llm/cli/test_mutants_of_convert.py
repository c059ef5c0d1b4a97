"""Hundreds of damaged models and checkpoints for convert: one clear line or success, never more."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_llm.cli import convert as convert_command
from tests.llm import tiny
from tests.llm.mutants import (
    VALUES,
    as_json,
    changed,
    check_yaml,
    damaged,
    flags,
    known_flags,
    mutants,
    run,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.save(name, folder) for name in FAMILIES}


FAMILIES = ["llama3", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek2", "deepseek3"]


def check_converted(target, end):
    assert end.code == 0 or not target.exists() or not any(target.iterdir())
    shutil.rmtree(target, ignore_errors=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_configs(models, tmp_path, family):
    model = shutil.copytree(models[family], tmp_path / "model")
    good = (model / "config.json").read_bytes()

    @mutants()
    @given(changed(json.loads(good)).map(as_json) | damaged(good))
    def check(content):
        (model / "config.json").write_bytes(content)
        check_converted(
            tmp_path / "out", run("convert", "--load-dir", model, "--save-dir", tmp_path / "out")
        )

    check()


def test_safetensors(models, tmp_path):
    model = shutil.copytree(models["qwen2"], tmp_path / "model")
    path = model / "model.safetensors"
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])

    def rebuilt(values):
        text = as_json(values)
        return len(text).to_bytes(8, "little") + text + good[8 + length :]

    @mutants(2)
    @given(damaged(good, 8 + length) | changed(header).map(rebuilt))
    def check(content):
        path.write_bytes(content)
        check_converted(
            tmp_path / "out", run("convert", "--load-dir", model, "--save-dir", tmp_path / "out")
        )

    check()


@pytest.mark.parametrize("where", ["beginning", "end", "tracker"])
def test_checkpoints(models, tmp_path, where):
    """Damage to the pickle at the beginning, the directory at the end, the name of the newest."""
    source = tmp_path / "mg"
    assert run("convert", "--load-dir", models["qwen3_moe"], "--save-dir", source).code == 0
    path = source / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    if where == "tracker":
        path = source / "latest_checkpointed_iteration.txt"
    good = path.read_bytes()
    strategy = damaged(good, 6000)
    if where == "end":
        strategy = damaged(good[-6000:]).map(lambda tail: good[:-6000] + tail)

    @mutants()
    @given(strategy)
    def check(content):
        path.write_bytes(content)
        words = ("convert", "--load-model-type", "mg", "--save-model-type", "hf")
        check_converted(
            tmp_path / "out", run(*words, "--load-dir", source, "--save-dir", tmp_path / "out")
        )

    check()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_training_checkpoints(models, tmp_path, name):
    """The list of what is where, which is a pickle, and the file with the numbers."""
    import torch
    import torch.distributed.checkpoint as dcp

    mcore, source = tmp_path / "mcore", tmp_path / "mg"
    assert run("convert", "--load-dir", models["qwen2"], "--save-dir", mcore).code == 0
    rank = torch.load(mcore / "iter_0000001/mp_rank_00/model_optim_rng.pt", weights_only=True)
    dcp.save(rank["model"], checkpoint_id=source / "iter_0000001", no_dist=True)
    for other in ("hf", "latest_checkpointed_iteration.txt"):
        (mcore / other).rename(source / other)
    path = source / "iter_0000001" / name
    good = path.read_bytes()
    words = ("convert", "--load-model-type", "mg", "--save-model-type", "hf")
    words += ("--load-dir", source, "--save-dir", tmp_path / "out")
    end = run(*words)
    assert end.code == 0, end.error

    @mutants()
    @given(damaged(good))
    def check(content):
        path.write_bytes(content)
        check_converted(tmp_path / "out", run(*words))

    shutil.rmtree(tmp_path / "out")
    check()


def test_yaml_of_convert(models, tmp_path):
    values = {"load_dir": str(models["qwen2"]), "save_dir": str(tmp_path / "out")}
    values |= {"target_tensor_parallel_size": 2, "num_layer_list": "1,3", "params_dtype": "bf16"}
    values |= {"target_pipeline_parallel_size": 2}
    check_yaml(
        values, tmp_path / "run.yaml", "convert", lambda end: check_converted(tmp_path / "out", end)
    )


def test_flags_of_convert(models, tmp_path):
    known = known_flags(convert_command)

    @mutants(2)
    @given(flags(known, VALUES), st.sampled_from(["qwen2", "qwen3_moe"]))
    def check(words, name):
        base = ("convert", "--load-dir", models[name], "--save-dir", tmp_path / "out")
        check_converted(tmp_path / "out", run(*base, *words))

    check()
