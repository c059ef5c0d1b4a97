"""Logged losses of routers: equal to a formula, and the same in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.training.added_losses import LOAD_BALANCING, Z_LOSS
from tests.distributed.test_llm_z_loss import BATCH, LAYOUTS, make_even_samples, train_all
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import Sample, make_mixtral, settings, write_samples

RUNS: dict[str, dict[str, Any]] = LAYOUTS | {
    "TP2, tokens": LAYOUTS["TP2"] | {"calculate_per_token_loss": True},
    "CP2, tokens": LAYOUTS["CP2"] | {"calculate_per_token_loss": True},
    "TP2, load-aware recompute": LAYOUTS["TP2"] | {"moe_adaptive_recompute_activation": True},
}
Losses = dict[str, list[float]]


def logged(log_file: str) -> Losses:
    lines = map(json.loads, Path(log_file).read_text().splitlines())
    steps = [line for line in lines if "lm loss" in line]
    return {name: [step[name] for step in steps] for name in (LOAD_BALANCING, Z_LOSS)}


def first_losses(model: str, samples: list[Sample]) -> dict[str, float]:
    """Compute the losses of the first step, of the router logits of transformers' model."""
    from transformers import AutoModelForCausalLM

    mixtral = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logits: list[torch.Tensor] = []
    for layer in mixtral.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda gate, inputs, _: logits.append(inputs[0].flatten(0, -2) @ gate.weight.T)
        )
    with torch.no_grad():
        for ids, _ in samples[:BATCH]:
            mixtral(input_ids=torch.tensor(ids)[None])
    topk, experts = mixtral.config.num_experts_per_tok, mixtral.config.num_local_experts
    shares = [
        each.topk(topk).indices.flatten().bincount(minlength=experts) / (topk * len(each))
        for each in logits
    ]
    balance = [
        experts * (share * each.softmax(-1).mean(0)).sum() for share, each in zip(shares, logits)
    ]
    squares = [each.logsumexp(-1).square().mean() for each in logits]
    return {
        LOAD_BALANCING: torch.stack(balance).mean().item(),
        Z_LOSS: torch.stack(squares).mean().item(),
    }


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Losses]:
    """Every layout, one rank and the formula; a world is started once."""
    folder = tmp_path_factory.mktemp("losses")
    model, samples = make_mixtral(folder / "hf", router_aux_loss_coef=0.05), make_even_samples()
    data = write_samples(folder / "data", samples)

    def run(name: str, values: dict[str, Any]) -> dict[str, Any]:
        given = {"train_iters": 2, "global_batch_size": BATCH, "moe_z_loss_coeff": 0.1}
        given |= {"log_file": str(folder / f"{name}.jsonl")}
        return settings(model, data, folder, **given | values)

    found = {}
    for world, layouts in ((1, {"one rank": {}}), (2, RUNS)):
        runs = {name: run(name, values) for name, values in layouts.items()}
        run_ranks(train_all, world, list(runs.values()), timeout=300)
        found |= {name: logged(values["log_file"]) for name, values in runs.items()}
    found["formula"] = {name: [value] for name, value in first_losses(model, samples).items()}
    return found


@pytest.mark.parametrize("layout", RUNS)
def test_losses_are_those_of_one_rank(losses: dict[str, Losses], layout: str) -> None:
    steps = 1 if "tokens" in layout else 2  # another mean trains other weights
    for name, expected in losses["one rank"].items():
        assert losses[layout][name][:steps] == pytest.approx(expected[:steps], rel=1e-5), name


def test_losses_are_those_of_the_formula(losses: dict[str, Losses]) -> None:
    for name, expected in losses["formula"].items():
        assert losses["one rank"][name][:1] == pytest.approx(expected, rel=1e-5), name
