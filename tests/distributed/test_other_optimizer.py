"""Resuming with another optimizer, and what else Megatron refuses, is one line; SGD goes on."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mindspeed.config import ConfigError
from tests.llm import tiny
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    settings,
    train,
    write_samples,
)

KINDS: dict[str, dict[str, Any]] = {
    "adam": {},
    "sharded": {"use_distributed_optimizer": True},
    "bf16": {"bf16": True},
    "ema": {"optimizer_selection": "fused_ema_adamw"},
    "sgd": {"optimizer": "sgd"},
}
OTHERS = [("adam", "sgd"), ("sgd", "adam"), ("adam", "ema"), ("adam", "sharded")]
OTHERS += [("sharded", "adam"), ("adam", "bf16"), ("bf16", "adam")]


def _resume_with_others(model: str, data: str, folder: Path) -> dict[tuple[str, str], str]:
    saved = {}
    for name, changes in KINDS.items():
        values = settings(model, data, folder, train_iters=1, save=str(folder / name), **changes)
        train(values)
        saved[name] = values
    said = {}
    for old, new in OTHERS:
        values = saved[new] | {"save": str(folder / f"{old}-{new}"), "train_iters": 2}
        shutil.copytree(folder / old, values["save"])
        said[old, new] = _refusal(values)
        train(values | {"no_load_optim": True})  # as the advice says
    return said


def _refusal(values: dict[str, Any]) -> str:
    from megatron.core import parallel_state

    with pytest.raises(ConfigError) as caught:
        train(values)
    parallel_state.destroy_model_parallel()
    return str(caught.value)


def test_another_optimizer_is_named_in_one_line(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    data = write_samples(tmp_path / "data", make_samples(8))
    (said,) = run_ranks(_resume_with_others, 1, model, data, tmp_path)
    for (old, new), line in said.items():
        assert line.endswith(
            "resume with the --optimizer, --use-distributed-optimizer and precision of that run, "
            "or give --no-load-optim"
        ), (old, new, line)
        assert len(line) < 400 and "\n" not in line
    assert "(exp_avg, exp_avg_sq) than this run has (momentum_buffer)" in said["adam", "sgd"]


def _train_whole_and_broken(model: str, data: str, folder: Path) -> tuple[list[float], ...]:
    values = settings(model, data, folder, train_iters=4, **KINDS["sgd"])
    whole = train(values | {"save": str(folder / "whole")})
    values |= {"save": str(folder / "broken")}
    train(values | {"train_iters": 2})
    return whole, train(values)


def test_momentum_goes_on(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    data = write_samples(tmp_path / "data", make_samples(8))
    ((whole, broken),) = run_ranks(_train_whole_and_broken, 1, model, data, tmp_path)
    assert broken == whole


def _refusals(inputs: dict[str, str], folder: Path) -> dict[str, str]:
    said = {}
    for name, changes in {
        "experts": {"load": inputs["experts"], "tensor_model_parallel_size": 2},
        "rank": {"load": inputs["experts"], "expert_model_parallel_size": 3},
        "dense": {"load": inputs["dense"], "expert_model_parallel_size": 2},
        "sgd": {"load": inputs["dense"], **KINDS["sgd"], **KINDS["sharded"]},
    }.items():
        values = settings("", inputs["data"], folder, train_iters=1, **changes)
        said[name] = _refusal(values)
    return said


def test_what_megatron_refuses_is_one_line(tmp_path: Path) -> None:
    inputs = {
        "experts": str(tiny.save("qwen3_moe", tmp_path)),
        "dense": make_model(tmp_path / "model", num_hidden_layers=1),
        "data": write_samples(tmp_path / "data", make_samples(8)),
    }
    for said in run_ranks(_refusals, 2, inputs, tmp_path):
        assert "add --sequence-parallel, or use 1" in said["experts"]
        assert "--expert-model-parallel-size 3 does not divide --num-experts 4" in said["rank"]
        assert "the model has no experts: use 1" in said["dense"]
        assert said["sgd"].startswith("Megatron refuses these options: Only Adam")
