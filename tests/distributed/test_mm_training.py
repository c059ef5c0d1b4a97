"""Sharded training through mindspeed_mm's train loop equals a plain torch loop in one process."""

import functools
import operator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mindspeed.config import ConfigError
from mindspeed_mm.checkpoint import ConvertOptions
from mindspeed_mm.checkpoint.conversion import convert
from tests.mm import runs, tiny
from tests.ranks import run_ranks

SHARDED = {"sharding_size": "auto"}
Rows = dict[str, dict[str, Any]]


def every_option(layers: list[str], frozen: str) -> Rows:
    """Return every option of the document's table alone, and many of them combined."""
    wrapped, recompute = SHARDED | {"sub_modules_to_wrap": layers}, {"recompute_modules": layers}
    ahead = {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2}
    rows: Rows = {
        "replicated": {"sharding_size": 1},
        "sharded": SHARDED,
        "compute": SHARDED | {"param_dtype": "fp32"},
        "reduce": SHARDED | {"reduce_dtype": "fp32"},
        "output": SHARDED | {"output_dtype": "fp32"},
        "no_casts": SHARDED | {"cast_forward_inputs": False},
        "modules": wrapped,
        "ignored": SHARDED | {"ignored_modules": [frozen]},
        "recompute": SHARDED | recompute,
        "recompute_non_reentrant": SHARDED | recompute | {"use_reentrant": False},
        "zero2": wrapped | {"reshard_after_forward": False},
        "offload": SHARDED | {"offload_to_cpu": True, "pin_memory": True},
        "ahead": wrapped | ahead,
    }
    names = ("offload", "zero2", "recompute", "ahead", "ignored")
    return rows | {"together": functools.reduce(operator.or_, map(rows.get, names))}


ROWS = every_option(["layers.{*}"], "image_encoder")


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


def test_every_option_of_the_table(tmp_path: Path, user: runs.Outcome) -> None:
    run_ranks(train_user, 2, str(tmp_path), ROWS, {}, timeout=280)
    for name in ROWS:
        check(tmp_path / name, user)


def test_hsdp(tmp_path: Path, user: runs.Outcome) -> None:
    rows = {"hsdp": ROWS["together"] | {"sharding_size": 2}}
    run_ranks(train_user, 4, str(tmp_path), rows, {}, timeout=280)
    check(tmp_path / "hsdp", user)


class Modules(NamedTuple):
    """Names of modules of a model of transformers."""

    text: str
    vision: str
    frozen: str


MODULES = {
    "internvl": Modules(
        "model.language_model.layers.{*}",
        "model.vision_tower.encoder.layer.{*}",
        "model.vision_tower.embeddings",
    ),
    "qwen2_5_vl": Modules(
        "model.language_model.layers.{*}", "model.visual.blocks.{*}", "model.visual.patch_embed"
    ),
}
ALPHA = 6
Cases = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def tiny_cases(modules: Modules) -> Cases:
    """Return FSDP2 options and flags: every option at least once, alone only in user's model."""
    rows = every_option([modules.text, modules.vision], modules.frozen)
    once = {"recompute_modules": [modules.text], "use_reentrant": False}
    # The model computes in float32 anyway: casts must change nothing.
    casts = rows["compute"] | rows["reduce"] | rows["output"]
    plain: dict[str, Any] = {"no_save_optim": True}
    return {
        "replicated": (rows["replicated"] | rows["recompute"], plain),
        "casts": (casts | rows["no_casts"] | rows["ignored"], plain),
        "together": (rows["together"], plain),
        "meta": (rows["zero2"] | rows["recompute"], {"init_model_with_meta_device": True}),
        "ulysses": (rows["ahead"] | rows["offload"] | once | casts, {"context_parallel_size": 2}),
    }


def train_tiny(folder: str, models: dict[str, str]) -> None:
    for name, model in models.items():
        section = {"init_from_hf_path": model, "freeze": [MODULES[name].frozen]}
        for case, (fsdp, changes) in tiny_cases(MODULES[name]).items():
            run = runs.make_run(runs.options(Path(folder, name, case), **changes), fsdp, section)
            runs.train_once(run, runs.tiny_callbacks(name))
    _train_adapters(folder, models)


def _train_adapters(folder: str, models: dict[str, str]) -> None:
    """Train adapters; resuming with another alpha raises."""
    (name, model), *_ = models.items()
    for alpha, steps in ((ALPHA, 2), (2 * ALPHA, 3)):
        lora = {"r": 4, "alpha": alpha, "target_modules": ["q_proj"]}
        section = {"init_from_hf_path": model, "lora": lora}
        flags = runs.options(Path(folder, "adapters"), train_iters=steps)
        run = runs.make_run(flags, SHARDED, section)
        with nullcontext() if alpha == ALPHA else pytest.raises(ConfigError, match="resume has 6"):
            runs.train_once(run, runs.tiny_callbacks(name))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train both models in all cases with one launch of ranks; return the folder."""
    root = tmp_path_factory.mktemp("tiny")
    models = {name: tiny.save(name, root / "models" / name) for name in MODULES}
    run_ranks(train_tiny, 2, str(root), models, timeout=840)
    return root


@pytest.mark.parametrize("name", MODULES)
def test_every_option_with_models_of_transformers(trained: Path, name: str) -> None:
    plain = tiny.new_model(name).train()
    plain.get_submodule(MODULES[name].frozen).requires_grad_(False)
    expected = runs.plain_loop(plain, runs.TinyData(name), lambda m, b: m(**b).loss)
    expected.weights = {f"model.{key}": value for key, value in expected.weights.items()}
    for case in tiny_cases(MODULES[name]):
        check(trained / name / case, expected)


def test_adapters_of_a_checkpoint_are_merged_with_their_own_scale(trained: Path) -> None:
    load, save, base = (str(trained / name) for name in ("adapters", "merged", "models/internvl"))
    options = ConvertOptions(load_dir=load, save_dir=save, model_assets_dir=base)
    with pytest.raises(ConfigError, match="were trained with 6: leave the flag out"):
        convert(options.model_copy(update={"lora_alpha": 2 * ALPHA}))
    convert(options)
    plain = tiny.new_model("internvl")
    stored, before = runs.outcome_weights(trained / "adapters"), plain.state_dict()
    merged = type(plain).from_pretrained(save).state_dict()
    assert merged.keys() == before.keys()
    for name, weight in before.items():
        layer = f"model.{name.removesuffix('.weight')}.lora_"
        if name.endswith("q_proj.weight"):
            low, high = (stored[f"{layer}{letter}.default.weight"] for letter in "AB")
            assert high.any()
            weight = weight + ALPHA / 4 * (high @ low)
        torch.testing.assert_close(merged[name], weight)
