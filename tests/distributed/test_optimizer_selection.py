"""Every --optimizer-selection trains alike in Megatron, and the average is the weights' own."""

import pytest
import torch

from tests.gpt.layout import Layout
from tests.gpt.runs import STEPS, trained
from tests.ranks import run_ranks

LAYOUTS = [Layout("llama"), Layout("llama", bf16=True, dp=2, distributed_optimizer=True)]


def train(layout, selection):
    import mindspeed
    from tests.gpt.training import Training

    mindspeed.enable(optimizer_selection=selection, ema_decay=0.5)
    training = Training(layout)
    optimizers = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    inner = optimizers[0].optimizer
    averages, losses = [], []
    for step in range(1, STEPS + 1):
        params = [p for group in inner.param_groups for p in group["params"]]
        before = [p.detach().double() for p in params]
        losses.append(training.step()[0])
        decay = min(0.5, (1 + step) / (10 + step))
        averages = [
            decay * old + (1 - decay) * p.detach().double()
            for old, p in zip(averages or before, params)
        ]
    found = inner.averages() if selection == "fused_ema_adamw" else {}
    errors = [
        (found[p].double() - wanted).abs().max().item()
        for p, wanted in zip(params, averages)
        if found
    ]
    return type(inner).__name__, losses, max(errors, default=None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("selection", "name"),
    [
        ("fused_adamw", "FusedAdam"),
        ("fused_torch_adamw", "TorchFusedAdam"),
        ("fused_ema_adamw", "FusedEmaAdam"),
    ],
)
def test_same_training(layout, selection, name):
    expected = trained(layout)
    results = run_ranks(train, layout.world, layout, selection)
    assert {result[0] for result in results} == {name}
    mean = torch.tensor([losses for _, losses, _ in results]).mean(0).tolist()
    assert mean == pytest.approx(expected.losses, rel=2e-3 if layout.bf16 else 1e-6)
    for *_, error in results:
        assert (error is None) == (name != "FusedEmaAdam")
        assert error is None or error < 1e-6


def _parts(training):
    optimizers = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    return optimizers[0], optimizers[0].optimizer


def start(layout):
    import mindspeed
    from tests.gpt.training import Training

    mindspeed.enable(optimizer_selection="fused_ema_adamw", ema_decay=0.5)
    return Training(layout)


def save_and_resume(layout, how, folder):
    """Train, save, train on; resume in a second training; return both ends."""
    from megatron.core import parallel_state

    from tests.gpt import checkpoint

    first = start(layout)
    for _ in range(3):
        first.step()
    part, _ = _parts(first)
    if how == "sharded":
        checkpoint.save(first, folder)
    else:
        plain, gathered = first.optimizer.state_dict(), part.get_parameter_state_dp_zero()
    ends = [end(first)]
    parallel_state.destroy_model_parallel()
    second = start(layout)
    if how == "sharded":
        checkpoint.load(second, folder)
    else:
        second.optimizer.load_state_dict(plain)
        _parts(second)[0].load_parameter_state_from_dp_zero(gathered)
        _parts(second)[0]._copy_main_params_to_model_params()
        for chunk in second.wrapped:
            chunk.start_param_sync(force_sync=True)
    ends.append(end(second))
    return ends


def end(training):
    _, adam = _parts(training)
    before = [average.clone() for average in adam.averages().values()]
    losses = [training.step()[0] for _ in range(3)]
    return losses, before, [average.clone() for average in adam.averages().values()]


DISTRIBUTED = Layout("llama", bf16=True, dp=2, distributed_optimizer=True)


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        (DISTRIBUTED, "sharded"),
        (DISTRIBUTED, "gathered"),
        (Layout("llama"), "sharded"),
        (Layout("llama", bf16=True), "sharded"),
    ],
    ids=str,
)
def test_the_average_is_saved_and_resumed(layout, how, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    for whole, resumed in run_ranks(save_and_resume, layout.world, layout, how, str(folder)):
        assert resumed[0] == whole[0]
        for got, want in zip(resumed[1] + resumed[2], whole[1] + whole[2], strict=True):
            assert torch.equal(got, want)


def averaged(layout):
    """Return this rank's averages, and the averaged model that a checkpoint holds."""
    from mindspeed.te.pytorch.optimizers.ema_checkpoint import averaged_model

    training = start(layout)
    for _ in range(3):
        training.step()
    _, adam = _parts(training)
    weights = [shard.values for shard in training.weights()]
    averages = [average.clone() for average in adam.averages().values()]
    model = averaged_model(training.wrapped, training.optimizer)["ema_model"]
    again = [shard.values for shard in training.weights()]
    assert all(map(torch.equal, weights, again)), "the weights are as they were"
    assert all(map(torch.equal, averages, adam.averages().values()))
    tensors = [value for value in model.values() if isinstance(value, torch.Tensor)]
    return averages, tensors


@pytest.mark.parametrize("layout", [Layout("llama"), DISTRIBUTED], ids=str)
def test_the_averaged_model(layout):
    results = run_ranks(averaged, layout.world, layout)
    numbers = torch.cat([a.flatten() for averages, _ in results for a in averages])
    for _, tensors in results:
        model = torch.cat([tensor.float().flatten() for tensor in tensors])
        rounded = numbers.bfloat16().float() if layout.bf16 else numbers
        # The optimizer's order is not the model's.
        assert torch.equal(model.sort().values, rounded.sort().values)
