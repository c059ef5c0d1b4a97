"""FusedAdam inside Megatron's distributed optimizer: states in fewer bits, saved and resumed."""

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.gpt.layout import Layout
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from tests.gpt.training import Training

LAYOUT = Layout("llama", num_layers=1, bf16=True, dp=2, distributed_optimizer=True)
STEPS = 6
WHOLE = {"use_precision_aware_optimizer": True, "store_param_remainders": False}
REMAINDERS = {"use_precision_aware_optimizer": True}
SMALL = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.float16,
}


def start(options: dict[str, Any]) -> "Training":
    from megatron.core.optimizer import OptimizerConfig

    import tests.gpt.training as module
    from mindspeed.te.pytorch.optimizers import FusedAdam

    # Older releases always keep remainders and have no option for it.
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    options = {name: value for name, value in options.items() if name in known}
    plain = module.optimizer_config
    module.optimizer_config = lambda layout: dataclasses.replace(plain(layout), **options)
    training = module.Training(LAYOUT)
    module.optimizer_config = plain
    assert isinstance(inner(training), FusedAdam)
    return training


def inner(training: "Training") -> Any:
    return training.optimizer.chained_optimizers[0].optimizer


def masters(training: "Training") -> list[torch.Tensor]:
    """Return this rank's float32 weights."""
    adam = inner(training)
    params = [param for group in adam.param_groups for param in group["params"]]
    if not adam.master_weights:
        return [param.detach() for param in params]
    return [adam.get_unscaled_state(param, "master_param") for param in params]


def train(options: dict[str, Any]) -> tuple[list[float], list[torch.Tensor], set[torch.dtype]]:
    """Train; return the losses, this rank's weights after each step, and the types of the state."""
    training = start(options)
    losses, weights = [], []
    for _ in range(STEPS):
        losses.append(training.step()[0])
        weights.append(torch.cat([weight.flatten() for weight in masters(training)]))
    states = {value.dtype for state in inner(training).state.values() for value in state.values()}
    return losses, weights, states


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return run_ranks(train, 2, {})


@pytest.mark.parametrize("options", [WHOLE, REMAINDERS], ids=["whole", "remainders"])
def test_master_weights_of_the_optimizer_are_megatrons_own(
    plain: list[Any], options: dict[str, Any]
) -> None:
    kept = run_ranks(train, 2, options)
    in_halves = torch.int16 in kept[0][2]
    for (losses, weights, _), (kept_losses, kept_weights, dtypes) in zip(plain, kept, strict=True):
        assert dtypes == ({torch.float32, torch.int16} if in_halves else {torch.float32})
        assert kept_losses == losses
        for got, want in zip(kept_weights, weights, strict=True):
            assert torch.equal(got, want)


def test_moments_in_fewer_bits_train_alike(plain: list[Any]) -> None:
    runs = plain, run_ranks(train, 2, SMALL)
    for (losses, _, _), (small_losses, _, dtypes) in zip(*runs, strict=True):
        assert dtypes == {torch.bfloat16, torch.float16, torch.int16}
        assert small_losses == pytest.approx(losses, rel=5e-3)
        assert small_losses != losses


def go_on(training: "Training") -> tuple[list[float], list[torch.Tensor]]:
    return [training.step()[0] for _ in range(STEPS // 2)], masters(training)


def interrupt(options: dict[str, Any], file: str) -> list[Any]:
    """Train on from the middle twice: at once, and from what was saved there."""
    from megatron.core import parallel_state

    training = start(options)
    for _ in range(STEPS // 2):
        training.step()
    saved = copy.deepcopy((training.chunks[0].state_dict(), training.optimizer.state_dict()))
    training.optimizer.save_parameter_state(file)
    uninterrupted = go_on(training)

    parallel_state.destroy_model_parallel()
    training = start(options)
    training.chunks[0].load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    training.optimizer.load_parameter_state(file)
    assert inner(training).param_groups[0]["step"] == STEPS // 2
    return [uninterrupted, go_on(training)]


@pytest.mark.parametrize(
    "options", [{}, WHOLE, REMAINDERS, SMALL], ids=["plain", "whole", "remainders", "small"]
)
def test_resumed_training_is_the_uninterrupted_one(options: dict[str, Any], tmp_path: Path) -> None:
    for (losses, weights), (again, weights_again) in run_ranks(
        interrupt, 2, options, str(tmp_path / "optimizer.pt")
    ):
        assert again == losses
        for got, want in zip(weights_again, weights, strict=True):
            assert torch.equal(got, want)
