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
