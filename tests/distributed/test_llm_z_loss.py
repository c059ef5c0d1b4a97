"""The router z-loss of a training: equal to a formula, on one rank and in every layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    CLIP,
    DECAY,
    RATE,
    VOCABULARY,
    Sample,
    make_mixtral,
    settings,
    write_samples,
)

COEFFICIENT = 0.1
STEPS, BATCH, LENGTH = 2, 4, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP2": {"context_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "DP2": {},
    "EP2, recompute": {
        "expert_model_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
MEANS = {"micro-batches": {}, "tokens": {"calculate_per_token_loss": True}}
Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def train_all(runs: list[dict[str, Any]]) -> None:
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.posttrain.sft import SFTTrainer
    from mindspeed_llm.training.options import TrainOptions

    for values in runs:
        SFTTrainer(TrainOptions(**values)).train()
        parallel_state.destroy_model_parallel()


def steps_of(log_file: str) -> Steps:
    lines = map(json.loads, Path(log_file).read_text().splitlines())
    return [(line["lm loss"], line["grad norm"]) for line in lines if "lm loss" in line]


def plain_steps(model: str, samples: list[Sample], coefficient: float, per_token: bool) -> Steps:
    """Train with transformers and torch; the z-loss is the formula in `z_loss`."""
    from transformers import AutoModelForCausalLM

    mixtral = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    squares: list[torch.Tensor] = []
    for layer in mixtral.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda gate, inputs, _: squares.append(
                (inputs[0].reshape(-1, inputs[0].shape[-1]) @ gate.weight.T)
                .exp()
                .sum(-1)
                .log()
                .square()
            )
        )
    named = list(mixtral.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    steps = []
    for start in range(0, STEPS * BATCH, BATCH):
        chosen = samples[start : start + BATCH]
        counts = [int((labels[1:] != -100).sum()) for _, labels in chosen]
        total = 0.0
        for (ids, labels), count in zip(chosen, counts, strict=True):
            squares.clear()
            loss = mixtral(
                input_ids=torch.tensor(ids)[None], labels=torch.tensor(labels)[None]
            ).loss
            z_loss = coefficient * sum(square.mean() for square in squares)
            # A mean over tokens counts micro-batches by their labels, and the z-loss by tokens.
            shares = (count, LENGTH) if per_token else (1, 1)
            whole = sum(counts) if per_token else BATCH
            ((loss * shares[0] + z_loss * shares[1]) / whole).backward()
            total += loss.item() * shares[0] / whole
        norm = torch.nn.utils.clip_grad_norm_(mixtral.parameters(), CLIP).item()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total, norm))
    return steps


def make_even_samples() -> list[Sample]:
    """Return samples that no layout pads, with different numbers of labels."""
    generator = np.random.default_rng(0)
    samples = []
    for number in range(STEPS * BATCH):
        ids = generator.integers(0, VOCABULARY, LENGTH)
        labels = ids.copy()
        labels[: 1 + number % 5 * 2] = -100
        samples.append((ids, labels))
    return samples


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """Every layout and mean, one rank and the formula; a world is started once."""
    folder = tmp_path_factory.mktemp("z-loss")
    model, samples = make_mixtral(folder / "hf", router_aux_loss_coef=0.0), make_even_samples()
    data = write_samples(folder / "data", samples)

    def run(name: str, **values: Any) -> dict[str, Any]:
        given = {"train_iters": STEPS, "global_batch_size": BATCH}
        given |= {"moe_z_loss_coeff": COEFFICIENT, "log_file": str(folder / f"{name}.jsonl")}
        return settings(model, data, folder, **given | values)

    found = {}
    for world, layouts in ((1, {"one rank": {}}), (2, LAYOUTS)):
        runs = {
            f"{layout}, {mean}": run(f"{layout}, {mean}", **values, **MEANS[mean])
            for layout, values in layouts.items()
            for mean in MEANS
        }
        if world == 1:
            runs["none"] = run("none", moe_z_loss_coeff=0.0)
        run_ranks(train_all, world, list(runs.values()), timeout=300)
        found |= {name: steps_of(values["log_file"]) for name, values in runs.items()}
    for mean, values in MEANS.items():
        found[f"formula, {mean}"] = plain_steps(model, samples, COEFFICIENT, bool(values))
    found["formula, none"] = plain_steps(model, samples, 0.0, False)
    return found


def assert_equal_steps(found: Steps, expected: Steps, tolerance: float) -> None:
    assert len(found) == STEPS
    for pair in zip(found, expected, strict=True):
        assert pair[0] == pytest.approx(pair[1], rel=tolerance)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_z_loss_is_that_of_one_rank(steps: dict[str, Steps], layout: str, mean: str) -> None:
    assert_equal_steps(steps[f"{layout}, {mean}"], steps[f"one rank, {mean}"], 1e-6)


@pytest.mark.parametrize("mean", MEANS)
def test_the_z_loss_is_the_formula(steps: dict[str, Steps], mean: str) -> None:
    assert_equal_steps(steps[f"one rank, {mean}"], steps[f"formula, {mean}"], 1e-5)


def test_a_factor_of_zero_is_no_z_loss(steps: dict[str, Steps]) -> None:
    assert_equal_steps(steps["none"], steps["formula, none"], 1e-5)
    norms = [steps[name][0][1] for name in ("none", "one rank, micro-batches")]
    assert abs(norms[0] / norms[1] - 1) > 0.1
