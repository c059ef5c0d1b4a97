"""Converted checkpoints and models carry digests: convert refuses damage and names the file."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.checkpoint.conversion import convert
from tests.unit.checkpoint.test_digests import flip

TP = {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def converted(models, tmp_path_factory):
    """The small llama as an mcore checkpoint of four ranks, and that as an HF model."""
    root = tmp_path_factory.mktemp("converted")
    convert(ConvertOptions(load_dir=str(models["llama"]), save_dir=str(root / "mg"), **TP))
    to_hf(root / "mg", root / "hf")
    return root


def to_hf(source, target, **flags):
    kinds = {"load_model_type": "mg", "save_model_type": "hf"}
    convert(ConvertOptions(load_dir=str(source), save_dir=str(target), **kinds, **flags))


def back(source, target, **flags):
    convert(ConvertOptions(load_dir=str(source), save_dir=str(target), **flags))


def test_what_each_file_is(converted):
    found = json.loads((converted / "mg/iter_0000001/digests.json").read_text())
    assert found["iteration"] == 1 and found["layout"]["tp"] == 2
    ranks = {name: (f["tp"], f["pp"], f["ep"]) for name, f in found["files"].items()}
    assert ranks == {
        f"mp_rank_0{tp}_00{pp}/model_optim_rng.pt": (tp, pp, 0) for tp in (0, 1) for pp in (0, 1)
    }
    assert {"config.json", "model.safetensors"} <= {
        *json.loads((converted / "hf/digests.json").read_text())["files"]
    }


@pytest.mark.parametrize("kind, run", [("mg", to_hf), ("hf", back)])
def test_flips_anywhere_are_named(converted, tmp_path, kind, run):
    generator = random.Random(7)
    files = [path for path in (converted / kind).rglob("*") if path.is_file()]
    files = [path for path in files if path.suffix in (".pt", ".safetensors") or kind == "hf"]
    for number in range(30):
        path = files[number % len(files)]
        keep = path.read_bytes()
        flip(path, generator.randrange(len(keep)), generator.randrange(8))
        try:
            with pytest.raises(ConfigError, match=path.name):
                run(converted / kind, tmp_path / "out")
        finally:
            path.write_bytes(keep)
    assert not (tmp_path / "out").exists()
    run(converted / kind, tmp_path / "out")


def test_swapped_ranks(converted, tmp_path):
    copy = tmp_path / "mg"
    shutil.copytree(converted / "mg", copy)
    names = [copy / f"iter_0000001/mp_rank_0{tp}_000/model_optim_rng.pt" for tp in (0, 1)]
    names[0].rename(copy / "x")
    names[1].rename(names[0])
    (copy / "x").rename(names[1])
    with pytest.raises(ConfigError, match="mp_rank_00_000/.*: holds what belongs to .*rank_01_000"):
        to_hf(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_verify_and_no_digests(converted, tmp_path, caplog):
    copy = tmp_path / "mg"
    shutil.copytree(converted / "mg", copy)
    path = copy / "iter_0000001/mp_rank_00_000/model_optim_rng.pt"
    flip(path)
    with pytest.raises(ConfigError, match="--no-verify"):
        to_hf(copy, tmp_path / "out")
    to_hf(copy, tmp_path / "out", no_verify=True)
    (copy / "iter_0000001/digests.json").unlink()
    to_hf(copy, tmp_path / "again")
    assert "has no digests.json" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["mg", "hf"])
def test_finite_values_on_request(models, tmp_path, value, kind):
    source = tmp_path / "hf"
    shutil.copytree(models["llama"], source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    load, save = ("hf", "mg") if kind == "mg" else ("mg", "hf")
    if kind == "hf":
        back(source, tmp_path / "mg")
        source = tmp_path / "mg"
    options = {"load_dir": str(source), "load_model_type": load, "save_model_type": save}
    convert(ConvertOptions(**options, save_dir=str(tmp_path / "unchecked")))
    with pytest.raises(ConfigError, match="holds NaN or infinity"):
        convert(ConvertOptions(**options, save_dir=str(tmp_path / "out"), check_finite=True))
    assert not (tmp_path / "out").exists()
    assert torch.isfinite(load_file(models["llama"] / "model.safetensors")["lm_head.weight"]).all()
