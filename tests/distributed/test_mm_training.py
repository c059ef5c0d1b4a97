"""Sharded training through mindspeed_mm's loop equals a plain loop of torch in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mm import runs, tiny
from tests.ranks import run_ranks

LAYERS = "layers.{*}"
# Every row of the document's table, alone.
ROWS: dict[str, dict[str, Any]] = {
    "replicated": {"sharding_size": 1},
    "sharded": {"sharding_size": "auto"},
    "compute": {"sharding_size": "auto", "param_dtype": "fp32"},
    "reduce": {"sharding_size": "auto", "reduce_dtype": "fp32"},
    "output": {"sharding_size": "auto", "output_dtype": "fp32"},
    "no_casts": {"sharding_size": "auto", "cast_forward_inputs": False},
    "modules": {"sharding_size": "auto", "sub_modules_to_wrap": [LAYERS]},
    "ignored": {"sharding_size": "auto", "ignored_modules": ["image_encoder"]},
    "recompute": {"sharding_size": "auto", "recompute_modules": [LAYERS]},
    "recompute_anew": {
        "sharding_size": "auto",
        "recompute_modules": [LAYERS],
        "use_reentrant": False,
    },
    "zero2": {
        "sharding_size": "auto",
        "sub_modules_to_wrap": [LAYERS],
        "reshard_after_forward": False,
    },
    "offload": {"sharding_size": "auto", "offload_to_cpu": True, "pin_memory": True},
    "ahead": {
        "sharding_size": "auto",
        "sub_modules_to_wrap": [LAYERS],
        "num_to_forward_prefetch": 2,
        "num_to_backward_prefetch": 2,
    },
}
TOGETHER = ROWS["offload"] | ROWS["zero2"] | ROWS["recompute"] | ROWS["ahead"] | ROWS["ignored"]


def train_user(folder: str, rows: dict[str, dict[str, Any]], changes: dict[str, Any]) -> None:
    for name, fsdp in rows.items():
        flags = runs.options(Path(folder) / name, **changes)
        runs.train_once(runs.make_run(flags, fsdp), runs.user_callbacks())


def check(folder: Path, expected: runs.Outcome) -> None:
    found = runs.outcome(folder)
    assert found.losses == pytest.approx(expected.losses, abs=1e-5), folder.name
    # Clipping and Adam would hide gradients of another scale.
    assert found.norms == pytest.approx(expected.norms, rel=1e-4), folder.name
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert (found.weights[name] - value).abs().max() < 1e-5, (folder.name, name)


@pytest.fixture(scope="module")
def user() -> runs.Outcome:
    torch.manual_seed(7)
    return runs.plain_loop(runs.UserModel(), runs.UserData(), runs.user_loss)


def test_every_row_of_the_table(tmp_path: Path, user: runs.Outcome) -> None:
    run_ranks(train_user, 2, str(tmp_path), ROWS | {"together": TOGETHER}, {}, timeout=280)
    for name in (*ROWS, "together"):
        check(tmp_path / name, user)


def test_copies_of_shards(tmp_path: Path, user: runs.Outcome) -> None:
    run_ranks(
        train_user, 4, str(tmp_path), {"hsdp": TOGETHER | {"sharding_size": 2}}, {}, timeout=280
    )
    check(tmp_path / "hsdp", user)


PARTS = {
    "internvl": ("model.language_model.layers.{*}", "model.vision_tower.encoder.layer.{*}"),
    "qwen2_5_vl": ("model.language_model.layers.{*}", "model.visual.blocks.{*}"),
}


def train_tiny(folder: str, name: str, model: str, cases: dict[str, tuple[Any, Any]]) -> None:
    for case, (fsdp, changes) in cases.items():
        flags = runs.options(Path(folder) / case, **changes)
        run = runs.make_run(flags, fsdp, {"init_from_hf_path": model})
        runs.train_once(run, runs.tiny_callbacks(name))


@pytest.mark.parametrize("name", PARTS)
def test_models_of_transformers(tmp_path: Path, name: str) -> None:
    model = tiny.save(name, tmp_path / "model")
    text, vision = PARTS[name]
    sharded = {"sharding_size": "auto", "sub_modules_to_wrap": [text, vision]}
    ahead = {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 2}
    cases = {
        "zero2": (
            sharded | {"reshard_after_forward": False, "recompute_modules": [text]},
            {"init_model_with_meta_device": True},
        ),
        "all": (
            sharded
            | ahead
            | {"recompute_modules": [text], "use_reentrant": False}
            # The model computes in float32 anyway: casts must change nothing.
            | {"offload_to_cpu": True, "param_dtype": "fp32", "output_dtype": "fp32"},
            {"context_parallel_size": 2},
        ),
    }
    run_ranks(train_tiny, 2, str(tmp_path), name, model, cases, timeout=280)
    plain = tiny.new_model(name).train()
    expected = runs.plain_loop(plain, runs.TinyData(name), lambda m, b: m(**b).loss)
    expected.weights = {f"model.{key}": value for key, value in expected.weights.items()}
    for case in cases:
        check(tmp_path / case, expected)
