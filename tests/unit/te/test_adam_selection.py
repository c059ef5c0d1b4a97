"""The optimizers of --optimizer-selection against torch's AdamW and an average kept apart."""

import copy

import pytest
import torch

from mindspeed.features.base import Context
from mindspeed.features.registry import registry
from mindspeed.features.selection import select
from mindspeed.te.pytorch.optimizers import FusedAdam
from mindspeed.te.pytorch.optimizers.fused_ema_adam import FusedEmaAdam
from mindspeed.te.pytorch.optimizers.selection import TorchFusedAdam, select_adam

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in ((5, 3), (7,))]


def train(optimizer, params, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
        yield [param.detach().clone() for param in params]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9999, 1.0])
def test_average_equals_one_kept_apart(decay):
    ours, theirs = parameters(), parameters()
    optimizer = FusedEmaAdam(ours, ema_decay=decay, **OPTIONS)
    averages = [p.detach().double() for p in theirs]
    run = zip(train(optimizer, ours, 30), train(torch.optim.AdamW(theirs, **OPTIONS), theirs, 30))
    for step, (got, want) in enumerate(run, 1):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        d = min(decay, (1 + step) / (10 + step))
        averages = [d * a + (1 - d) * w.double() for a, w in zip(averages, got)]
    for param, wanted in zip(ours, averages):
        average = optimizer.averages()[param]
        torch.testing.assert_close(average.double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [FusedAdam, FusedEmaAdam, TorchFusedAdam])
@pytest.mark.parametrize("master", [False, True])
def test_saved_and_resumed(kind, master):
    dtype = torch.bfloat16 if master else torch.float32
    params = parameters(dtype)
    whole = kind(params, master_weights=master, **OPTIONS)
    list(train(whole, params, 3))
    saved = copy.deepcopy(whole.state_dict())
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = kind(resumed, master_weights=master, **OPTIONS)
    other.load_state_dict(saved)
    for got, want in zip(train(other, resumed, 3, seed=2), train(whole, params, 3, seed=2)):
        assert all(map(torch.equal, got, want))
    states = (
        [s for p in ps for s in o.state[p].values()]
        for o, ps in ((other, resumed), (whole, params))
    )
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize("kind", [FusedAdam, FusedEmaAdam, TorchFusedAdam])
def test_the_scale_of_gradients_clips_or_skips(kind):
    params, scaled = parameters(), parameters()
    plain, optimizer = kind(params, **OPTIONS), kind(scaled, **OPTIONS)
    generator = torch.Generator().manual_seed(1)
    for scale in (0.5, torch.nan, 0.25):
        before = [param.detach().clone() for param in scaled]
        grads = [torch.randn(param.shape, generator=generator) for param in params]
        for one, other, grad in zip(params, scaled, grads):
            one.grad, other.grad = grad * scale, grad.clone()
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        if kind is not TorchFusedAdam:  # torch's kernel has no place for a factor
            assert all(torch.equal(p.grad, g) for p, g in zip(scaled, grads)), "only read"
        if scale != scale:
            assert all(map(torch.equal, scaled, before))
            optimizer.param_groups[0]["step"] -= 1
        else:
            plain.step()
            assert all(map(torch.equal, scaled, params))


def test_a_state_without_average_starts_one():
    params = parameters()
    plain = FusedAdam(params, **OPTIONS)
    list(train(plain, params, 2))
    averaged = FusedEmaAdam(params, **OPTIONS)
    averaged.load_state_dict(plain.state_dict())
    for param in params:
        assert torch.equal(averaged.averages()[param], param.detach())


@pytest.mark.parametrize("remainders", [False, True])
def test_an_average_starts_from_the_master_weight_not_from_the_rounded_one(remainders):
    params = parameters(torch.bfloat16)
    options = OPTIONS | {"master_weights": True, "store_param_remainders": remainders}
    plain = FusedAdam(params, **options)
    list(train(plain, params, 2))
    averaged = FusedEmaAdam(params, **options)
    averaged.load_state_dict(plain.state_dict())
    for param in params:
        master = plain.get_unscaled_state(param, "master_param")
        assert not torch.equal(master, param.detach().float()), "the test could tell"
        assert torch.equal(averaged.averages()[param], master)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_torch_kernel_equals_ours(mode, bias_correction):
    options = OPTIONS | {"adam_w_mode": mode, "bias_correction": bias_correction}
    ours, theirs = parameters(), parameters()
    run = zip(
        train(FusedAdam(ours, **options), ours, 10),
        train(TorchFusedAdam(theirs, **options), theirs, 10),
    )
    for got, want in run:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_selection():
    assert select_adam(FusedAdam, "fused_adamw", 0.5) is FusedAdam
    assert select_adam(FusedAdam, "fused_torch_adamw", 0.5) is TorchFusedAdam
    averaged = select_adam(FusedAdam, "fused_ema_adamw", 0.5)
    assert averaged(parameters(), lr=0.1).ema_decay == 0.5
    assert issubclass(averaged, FusedAdam)
    assert averaged is select_adam(FusedAdam, "fused_ema_adamw", 0.5)


def test_decay_is_checked():
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        FusedEmaAdam(parameters(), ema_decay=2)


@pytest.mark.parametrize(
    ("selection", "is_read"),
    [("fused_adamw", False), ("fused_torch_adamw", False), ("fused_ema_adamw", True)],
)
def test_an_unused_decay_gives_a_warning(selection, is_read, caplog):
    chosen = registry()
    options = chosen.options_class(optimizer_selection=selection, ema_decay=0.5)
    select(chosen, options, Context())
    warning = f"ema_decay=0.5 has no effect: optimizer_selection={selection!r}"
    assert (warning in caplog.messages) is not is_read
