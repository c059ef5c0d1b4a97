"""Model parameters that Adam writes are those Megatron would have copied, and are written once."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mindspeed
from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_weights
from tests.ranks import run_ranks

PLAIN = Layout("llama", num_layers=2, bf16=True, spec="te")
SHARDED = replace(PLAIN, dp=2, distributed_optimizer=True)
EXPERTS = replace(SHARDED, family="experts")
STEPS = 3


class Casts(TorchDispatchMode):
    """Counts the tensors that are written in another dtype: one by one, and in lists."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("copy_", "_foreach_copy_"):
            targets, sources = ([x] if torch.is_tensor(x) else x for x in args[:2])
            casts = [target.dtype != source.dtype for target, source in zip(targets, sources)]
            self.counts[name] += sum(casts)
        return func(*args, **(kwargs or {}))


def _parts(optimizer):
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _start(layout, is_on, **features):
    from tests.gpt.training import Training

    mindspeed.enable(fuse_param_copy=is_on, **features)
    return Training(layout)


def _mains(training):
    """Return the float32 parameters that are copied."""
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    groups = [getattr(part, name, []) for part in _parts(training.optimizer) for name in names]
    return [main for group in groups for params in group for main in params if main is not None]


def _train(layout, is_on, features=None):
    training = _start(layout, is_on, **(features or {}))
    losses, history, casts = [], [], Counter()
    for _ in range(STEPS):
        losses.append(training.forward_backward())
        with Casts() as found:
            training.update()
        casts += found.counts
        history.append({shard.name: shard.values for shard in training.weights()})
    return losses, history, casts, len(_mains(training))


@pytest.mark.parametrize(
    ("layout", "features"),
    [
        (PLAIN, {}),
        (replace(PLAIN, dp=2), {}),
        (replace(PLAIN, family="gpt", pp=2), {}),
        (replace(SHARDED, dp=1), {}),
        (SHARDED, {}),
        (replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True), {}),
        (EXPERTS, {}),
        (PLAIN, {"optimizer_selection": "fused_ema_adamw"}),
        (SHARDED, {"optimizer_selection": "fused_ema_adamw"}),
        (SHARDED, {"optimizer_selection": "fused_torch_adamw"}),
    ],
    ids=str,
)
def test_same_weights_without_a_second_copy(layout, features):
    runs = [run_ranks(_train, layout.world, layout, is_on, features) for is_on in (False, True)]
    for plain, ours in zip(*runs, strict=True):
        losses, history, casts, count = plain
        assert count > 0
        assert casts == {"copy_": STEPS * count}
        assert ours[0] == losses
        for got, want in zip(ours[1], history, strict=True):
            assert_same_weights(got, want)
        assert ours[2:] == ({"_foreach_copy_": STEPS * count}, count)


@pytest.mark.parametrize("layout", [PLAIN, SHARDED], ids=str)
@pytest.mark.parametrize("switch", ["reuse_fp32_param", "swap_optimizer"])
def test_masters_of_the_optimizer_itself_stay_as_they_were(layout, switch):
    features = {switch: True}
    runs = [run_ranks(_train, layout.world, layout, is_on, features) for is_on in (False, True)]
    for plain, ours in zip(*runs, strict=True):
        assert ours[0] == plain[0]
        for got, want in zip(ours[1], plain[1], strict=True):
            assert_same_weights(got, want)
        assert ours[2:] == plain[2:]


def _skip(layout, is_on):
    """Take three updates, the second with a scale that is no number; return all weights."""
    from mindspeed.te.pytorch.optimizers import clipped_update

    training = _start(layout, is_on)
    history, mains = [], []
    for number in range(3):
        training.forward_backward()
        assert not training.optimizer.prepare_grads()
        norm = clipped_update.gradient_norm(training.optimizer)
        is_good = torch.tensor(number != 1)
        clipped_update.update(training.optimizer, norm, is_good)
        if number == 1:
            clipped_update.retract(training.optimizer)
        history.append({shard.name: shard.values for shard in training.weights()})
        mains.append([main.detach().clone() for main in _mains(training)])
    return history, mains


@pytest.mark.parametrize("layout", [PLAIN, SHARDED], ids=str)
def test_an_update_that_is_skipped_on_the_device_writes_nothing(layout):
    runs = [run_ranks(_skip, layout.world, layout, is_on) for is_on in (False, True)]
    for (plain, _), (ours, mains) in zip(*runs, strict=True):
        for got, want in zip(ours, plain, strict=True):
            assert_same_weights(got, want)
        assert_same_weights(ours[1], ours[0])
        assert all(map(torch.equal, mains[1], mains[0]))
        assert not all(map(torch.equal, ours[2].values(), ours[1].values()))


def _save(layout, is_on, folder):
    from tests.gpt import checkpoint

    training = _start(layout, is_on)
    training.step()
    checkpoint.save(training, folder)
    return _steps(training)


def _resume(layout, is_on, folder):
    """Load into a training that has taken another step."""
    from tests.gpt import checkpoint

    training = _start(layout, is_on)
    training.step()
    checkpoint.load(training, folder)
    return _steps(training)


def _steps(training):
    results = [training.step() for _ in range(2)]
    return results, {shard.name: shard.values for shard in training.weights()}


@pytest.mark.parametrize("layout", [PLAIN, SHARDED], ids=str)
def test_a_resumed_training_is_the_uninterrupted_one(layout, tmp_path):
    whole = run_ranks(_save, layout.world, layout, False, str(tmp_path))
    resumed = run_ranks(_resume, layout.world, layout, True, str(tmp_path))
    for (results, weights), (wanted, expected) in zip(resumed, whole, strict=True):
        assert results == wanted
        assert_same_weights(weights, expected)


def _small_optimizer(dtype, is_on):
    """Build Megatron's optimizer of two groups: 16-bit, float32 and frozen parameters."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    from mindspeed.te.pytorch.optimizers import FusedAdam

    mindspeed.enable(fuse_param_copy=is_on)
    torch.manual_seed(0)
    dtypes = [dtype, torch.float32, dtype, dtype, dtype]
    params = [torch.nn.Parameter(torch.randn(3, 5).to(each)) for each in dtypes]
    params[3].requires_grad_(False)
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    is_half = dtype == torch.float16
    scaler = DynamicGradScaler(
        initial_scale=8.0,
        min_scale=1.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=100,
        hysteresis=1,
    )
    config = OptimizerConfig(fp16=is_half, bf16=not is_half, params_dtype=dtype, clip_grad=1.0)
    adam = FusedAdam(groups, lr=0.1, weight_decay=0.1)
    scaler = scaler if is_half else None
    return params, Float16OptimizerWithFloat16Params(adam, config, scaler, None)


def _train_small(dtype, is_on):
    """Step with missing and infinite gradients, and with weights that are replaced in between."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    params, optimizer = _small_optimizer(dtype, is_on)
    optimizer.get_grad_stats_parallel_group = lambda: None
    history = []
    for step in range(6):
        for index, param in enumerate(params):
            grad = torch.randn_like(param) if param.requires_grad else None
            if param.dtype == torch.float32:
                param.main_grad = grad
            elif (step, index) != (1, 2):
                param.grad = grad
        if step == 3:
            params[0].grad.fill_(torch.inf if dtype == torch.float16 else 1.0)
        if step == 4:
            params[0].data = torch.randn_like(params[0])
            optimizer.reload_model_params()
        with Casts() as casts:
            is_done = optimizer.step()[0]
        assert is_done == (step != 3 or dtype != torch.float16)
        assert optimizer.optimizer.copies == {}
        assert optimizer.optimizer.copied == set()
        history.append((sum(casts.counts.values()), [p.detach().clone() for p in params]))
        optimizer.zero_grad()
    with torch.no_grad():
        main = optimizer.fp32_from_float16_groups[0][0].fill_(0.75)
    optimizer._copy_main_params_to_model_params()
    assert torch.equal(params[0], main.to(dtype)), "outside of a step all are copied"
    return history


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_and_parameters_of_all_kinds(dtype):
    (plain,), (ours,) = (run_ranks(_train_small, 1, dtype, is_on) for is_on in (False, True))
    skipped = dtype == torch.float16
    written = [3, 3, 3, 0 if skipped else 3, 3, 3]
    assert [count for count, _ in plain] == [count for count, _ in ours] == written
    for (_, got), (_, want) in zip(ours, plain, strict=True):
        assert all(map(torch.equal, got, want))
