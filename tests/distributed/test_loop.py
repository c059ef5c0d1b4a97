"""The loop beside its steps: half precision, evaluation, what it writes, data of another model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankFailed, group_time_outs, run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    plain_loop,
    settings,
    train,
    write_samples,
)

SAMPLES = make_samples(30)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    return make_model(folder / "hf"), write_samples(folder / "data", SAMPLES)


def _lines(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(values["log_file"]).read_text().splitlines()]


def test_evaluation_is_that_of_transformers_on_the_held_out_share(
    inputs: tuple[str, str], tmp_path: Path
) -> None:
    """Also: the same numbers are in the log, in TensorBoard, and beside the options."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = settings(
        *inputs,
        tmp_path,
        train_iters=2,
        split="80,20,0",
        eval_interval=2,
        eval_iters=1,
        tensorboard_dir=str(tmp_path / "board"),
    )
    run_ranks(_train_only, 2, values)
    lines = _lines(values)
    _, model = plain_loop(inputs[0], SAMPLES[:24], 2, 4)
    with torch.no_grad():
        pairs = [(torch.tensor(ids)[None], torch.tensor(labels)[None]) for ids, labels in SAMPLES]
        losses = [float(model(input_ids=i, labels=x).loss) for i, x in pairs[24:28]]
    evaluations = [line for line in lines if "validation lm loss" in line]
    assert len(lines) == 3 and len(evaluations) == 1
    assert evaluations[0]["validation lm loss"] == pytest.approx(sum(losses) / 4, abs=1e-5)

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    shown = {e.step: e.value for e in board.Scalars("lm loss")}
    assert shown == pytest.approx({n["iteration"]: n["lm loss"] for n in lines[:2]}, rel=1e-6)
    assert board.Scalars("validation lm loss")[0].step == 2


def test_counted_throughput_is_in_every_line(inputs: tuple[str, str], tmp_path: Path) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
    values = settings(
        *inputs, tmp_path, train_iters=2, op_cal_tflops=True, recompute_num_layers=1, **recompute
    )
    run_ranks(_train_only, 1, values)
    for line in _lines(values):
        model = line["model throughput per GPU (TFLOP/s/GPU)"]
        # A layer's forward, backward (twice that) and forward again; the output layer without.
        assert model < line["hardware throughput per GPU (TFLOP/s/GPU)"] < model * 4 / 3


def test_estimated_throughput_counts_tokens_without_padding(
    inputs: tuple[str, str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(inputs[0])
    config = model.config
    matrices = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and "embed_tokens" not in name
    )
    attention = config.num_hidden_layers * 48 * config.num_attention_heads * config.head_dim
    values = settings(*inputs, tmp_path, train_iters=2, log_throughput=True, seq_length=48)
    run_ranks(_train_only, 2, values)
    for line in _lines(values):
        per_token = 2e12 * line["throughput per GPU (TFLOP/s/GPU)"] / line["tokens/s"]
        assert per_token == pytest.approx(6 * (matrices + attention), rel=1e-6)


def _train_only(values: dict[str, Any]) -> None:
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    AutoTrainer(TrainOptions(**values)).train()


def test_half_precision_finds_its_scale_and_trains(inputs: tuple[str, str], tmp_path: Path) -> None:
    """A scale that overflows is halved, such steps change nothing, the others are those of fp32."""
    values = settings(*inputs, tmp_path, fp16=True, initial_loss_scale=2.0**24, hysteresis=1)
    run_ranks(_train_only, 1, values)
    lines = _lines(values)
    skipped = lines[-1]["number of skipped iterations"]
    assert 2 <= skipped < 12 and lines[-1]["number of nan iterations"] == 0
    assert lines[-1]["loss scale"] == 2.0 ** (24 - skipped)
    rates = [line for line in lines if line["number of skipped iterations"] == skipped]
    expected, _ = plain_loop(inputs[0], SAMPLES, 1, 4)
    assert lines[0]["lm loss"] == pytest.approx(expected[0], rel=2e-3)
    assert rates[0]["lm loss"] - rates[-1]["lm loss"] > 0.02


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_that_has_only_skipped_steps_is_saved_and_resumed(
    inputs: tuple[str, str], tmp_path: Path, is_shared: bool
) -> None:
    """The moments that it saves are those with which the optimizer begins."""
    half = {"fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1}
    half |= {"use_distributed_optimizer": is_shared, "train_iters": 12}
    whole = settings(*inputs, tmp_path / "whole", **half)
    parts = settings(*inputs, tmp_path / "parts", **half, save=str(tmp_path / "saved"))
    run_ranks(_train_only, 1, whole)
    run_ranks(_train_only, 1, parts | {"train_iters": 2})
    assert _lines(parts)[-1]["number of skipped iterations"] == 2
    run_ranks(_train_only, 1, parts)
    found, expected = ([x["lm loss"] for x in _lines(each)] for each in (parts, whole))
    assert found == expected and len(set(expected)) > 6


def _train_with_bad_step(values: dict[str, Any], is_asynchronous: bool) -> dict[str, Any]:
    """Train with a loss that is not finite in the third step; return the trained weights."""
    from mindspeed import device
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    type(device.current()).is_asynchronous = is_asynchronous
    trainer = AutoTrainer(TrainOptions(**values)).trainer
    loss_func, calls = trainer.loss_func, iter(range(1000))

    def bad_once(batch: Any, output: torch.Tensor) -> Any:
        is_bad = next(calls) // trainer.setup.dims.num_micro_batches == 2
        return loss_func(batch, output * float("nan") if is_bad else output)

    trainer.loss_func = bad_once
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.primary.chunks[0].named_parameters()}


def test_steps_that_are_queued_ahead_train_alike(inputs: tuple[str, str], tmp_path: Path) -> None:
    """Also after a step that was skipped: it does not count in the next one's update."""
    found, lines = [], []
    for is_asynchronous in (False, True):
        values = settings(*inputs, tmp_path / str(is_asynchronous), train_iters=6)
        found.append(run_ranks(_train_with_bad_step, 2, values, is_asynchronous)[0])
        lines.append([(n["iteration"], n.get("lm loss"), n["grad norm"]) for n in _lines(values)])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert repr(lines[0]) == repr(lines[1]) and len(lines[0]) == 6
    assert [loss for _, loss, _ in lines[0]].index(None) == 2


def _time_outs(values: dict[str, Any]) -> set[float]:
    from mindspeed_llm.training.options import TrainOptions
    from mindspeed_llm.training.setup import prepare

    prepare(TrainOptions(**values))
    return group_time_outs()


def test_every_group_has_the_time_out_of_the_run(inputs: tuple[str, str], tmp_path: Path) -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    values = settings(*inputs, tmp_path, distributed_timeout_minutes=3, **layout)
    assert run_ranks(_time_outs, 4, values) == [{180.0}] * 4


def test_data_of_a_larger_tokenizer_is_refused(inputs: tuple[str, str], tmp_path: Path) -> None:
    data = write_samples(tmp_path / "other", SAMPLES[:4])
    Path(f"{data}.summary.json").write_text('{"vocabulary": 500, "tokenizer": "elsewhere"}')
    values = settings(inputs[0], data, tmp_path)
    with pytest.raises(RankFailed, match="has 500 tokens, the model's embedding has 99"):
        run_ranks(train, 1, values)
