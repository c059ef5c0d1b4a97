import copy

import pytest
import torch

from mindspeed.optim.host_state import HostState
from mindspeed.te.pytorch.optimizers import FusedAdam, FusedSGD
from mindspeed.te.pytorch.optimizers.fused_adam import wrap_get_optimizer_states

SHAPES = [(4, 6), (6,), (3, 2, 2)]
HYPER = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def make_params(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]


def give_grads(step, *lists, attribute="grad"):
    torch.manual_seed(100 + step)
    grads = [torch.randn(s) for s in SHAPES]
    for params in lists:
        for param, grad in zip(params, grads):
            dtype = param.dtype if attribute == "grad" else torch.float32
            setattr(param, attribute, grad.to(dtype))


def groups(params):
    return [{"params": params[:1], "lr": 0.02}, {"params": params[1:], "weight_decay": 0.0}]


def largest_difference(left, right):
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(left, right))


@pytest.mark.parametrize(
    ("adam_w_mode", "torch_class"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
def test_equals_torch_over_ten_steps(adam_w_mode, torch_class):
    ours, theirs = make_params(), make_params()
    optimizer = FusedAdam(groups(ours), adam_w_mode=adam_w_mode, **HYPER)
    expected = torch_class(groups(theirs), **HYPER)
    for step in range(10):
        give_grads(step, ours, theirs)
        optimizer.step()
        expected.step()
    assert largest_difference(ours, theirs) <= 1e-7
    for mine, other in zip(ours, theirs):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[mine][name], expected.state[other][name])


def test_state_is_laid_out_as_megatron_expects():
    params = make_params()
    optimizer = FusedAdam([*groups(params), {"params": []}], **HYPER)
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [2, 2, None]
    assert set(optimizer.state) == {params[1]}
    assert set(optimizer.state[params[1]]) == {"exp_avg", "exp_avg_sq"}


OPTIONS = [
    {},
    {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16},
    {"master_weights": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
    {"master_weights": True, "store_param_remainders": True, "use_decoupled_grad": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_run_equals_the_uninterrupted_one(options, dtype):
    attribute = "decoupled_grad" if options.get("use_decoupled_grad") else "grad"
    whole = make_params(dtype)
    optimizer = FusedAdam(groups(whole), **HYPER, **options)
    for step in range(3):
        give_grads(step, whole, attribute=attribute)
        optimizer.step()

    saved = copy.deepcopy(optimizer.state_dict())
    tensors = [v for state in saved["state"].values() for v in state.values()]
    assert tensors and all(t.dtype == torch.float32 for t in tensors)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in whole]
    again = FusedAdam(groups(resumed), **HYPER, **options)
    again.load_state_dict(saved)
    for step in range(3, 6):
        give_grads(step, whole, resumed, attribute=attribute)
        optimizer.step()
        again.step()
    assert largest_difference(whole, resumed) == 0.0
    assert again.param_groups[0]["step"] == 6


def test_master_weights_of_bfloat16_parameters_equal_float32_training():
    params, exact = make_params(torch.bfloat16), make_params(torch.bfloat16)
    exact = [torch.nn.Parameter(p.detach().float()) for p in exact]
    optimizer = FusedAdam(params, master_weights=True, use_decoupled_grad=True, **HYPER)
    expected = torch.optim.AdamW(exact, **HYPER)
    for step in range(10):
        give_grads(step, params, attribute="decoupled_grad")
        give_grads(step, exact)
        optimizer.step()
        expected.step()
    for param, master in zip(params, exact):
        kept = optimizer.get_unscaled_state(param, "master_param")
        torch.testing.assert_close(kept, master.detach(), rtol=0, atol=1e-7)
        assert torch.equal(param.detach(), kept.bfloat16())


def test_remainders_lose_nothing():
    params, kept_whole = make_params(torch.bfloat16), make_params(torch.bfloat16)
    options = {"master_weights": True, "use_decoupled_grad": True, **HYPER}
    optimizer = FusedAdam(params, store_param_remainders=True, **options)
    expected = FusedAdam(kept_whole, **options)
    for step in range(5):
        give_grads(step, params, kept_whole, attribute="decoupled_grad")
        optimizer.step()
        expected.step()
    for param, other in zip(params, kept_whole):
        assert optimizer.state[param]["master_param"].dtype == torch.int16
        ours, theirs = (
            opt.get_unscaled_state(p, "master_param")
            for opt, p in ((optimizer, param), (expected, other))
        )
        assert torch.equal(ours, theirs)


def test_a_master_halfway_between_two_parameters_is_kept():
    """bfloat16 rounds to even there, up or down; 16 bits do not tell which."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x42008000, 0x00008000], dtype=torch.int32)
    halfway = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    param = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    options = {"master_weights": True, "store_param_remainders": True}
    optimizer = FusedAdam([param], **options, **HYPER)
    optimizer.initialize_state(param)
    optimizer.set_scaled_state(param, "master_param", halfway)
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), halfway)
    assert torch.equal(param.detach(), halfway.bfloat16())
    optimizer.set_scaled_state(param, "exp_avg_sq", torch.ones(8))
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), halfway)
    assert torch.equal(optimizer.get_unscaled_state(param, "exp_avg_sq"), torch.ones(8))


@pytest.mark.parametrize("remainders", [True, False])
def test_setting_the_master_sets_the_parameter(remainders):
    (param, *_) = params = make_params(torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True, store_param_remainders=remainders, **HYPER)
    optimizer.initialize_state(param)
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), param.detach().float())
    master = torch.randn(param.shape)
    optimizer.set_scaled_state(param, "master_param", master)
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), master)
    assert torch.equal(param.detach(), master.bfloat16())


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-10), (torch.uint8, 2**-4)]
)
def test_low_precision_moments_stay_close(dtype, rtol):
    params = make_params()
    optimizer = FusedAdam(params, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, **HYPER)
    give_grads(0, params)
    optimizer.step()
    for param in params:
        assert optimizer.state[param]["exp_avg"].dtype == dtype
        kept = optimizer.get_unscaled_state(param, "exp_avg_sq")
        largest = kept.max()
        # Small elements of a float8 tensor are far from its largest and lose accuracy.
        atol = (largest * 2**-17).item() if dtype == torch.uint8 else 0.0
        torch.testing.assert_close(kept, param.grad.square() * 0.05, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"master_weights": True}, torch.bfloat16),
        ({"master_weights": True, "store_param_remainders": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_state_of_the_host_that_is_being_saved_does_not_change(options, dtype):
    """A save in the background reads it while the next steps run."""
    params = make_params(dtype)
    optimizer = FusedAdam(params, **options, **HYPER)
    optimizer.host = HostState(64)
    give_grads(0, params)
    optimizer.step()

    def states_of(self, model_param):
        return self.state[model_param]

    taken = [
        tensor
        for param in params
        for tensor in (
            *(optimizer.get_unscaled_state(param, name) for name in optimizer.state[param]),
            *optimizer.state_dict()["state"][0].values(),
            *wrap_get_optimizer_states(states_of)(_Distributed(optimizer), param).values(),
        )
    ]
    before = copy.deepcopy(taken)
    give_grads(1, params)
    optimizer.step()
    assert all(map(torch.equal, taken, before))


class _Distributed:
    """As much of Megatron's distributed optimizer as returns the state itself."""

    def __init__(self, optimizer):
        self.optimizer, self.state = optimizer, optimizer.state


def test_zero_grad_clears_what_step_reads():
    params = make_params()
    optimizer = FusedAdam(params, use_decoupled_grad=True, **HYPER)
    give_grads(0, params, attribute="decoupled_grad")
    optimizer.zero_grad(set_to_none=False)
    assert all(p.decoupled_grad.abs().sum() == 0 for p in params)
    optimizer.zero_grad()
    assert all(p.decoupled_grad is None for p in params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True.*use amsgrad=False"),
        ({"capturable": True}, "capturable=True.*use capturable=False"),
        ({"exp_avg_dtype": torch.int32}, "cannot keep exp_avg in torch.int32: use torch.float32"),
        (
            {"master_weights": True, "master_weight_dtype": torch.uint8},
            "master_param in torch.uint8",
        ),
    ],
)
def test_what_is_not_supported_says_so(options, message):
    with pytest.raises(ValueError, match=message):
        FusedAdam(make_params(), **options)


def test_float64_parameters_are_refused():
    params = make_params(torch.float64)
    give_grads(0, params)
    with pytest.raises(TypeError, match="float64"):
        FusedAdam(params).step()


def test_copies_are_written_where_they_are_asked_for():
    params, plain = make_params(), make_params()
    optimizer, expected = FusedAdam(groups(params), **HYPER), FusedAdam(groups(plain), **HYPER)
    give_grads(0, params, plain)
    params[1].grad = plain[1].grad = None
    copies = [torch.zeros_like(param, dtype=torch.bfloat16) for param in params]
    optimizer.copies = {params[0]: copies[0], params[1]: copies[1]}
    optimizer.step()
    expected.step()
    assert all(map(torch.equal, params, plain))
    assert optimizer.copied == {params[0]}
    assert torch.equal(copies[0], params[0].detach().bfloat16())
    assert not copies[1].any()
    assert not copies[2].any()


@pytest.mark.parametrize("case", ["host", "moments", "masters"])
def test_copies_that_are_not_written_are_not_reported(case):
    options = {"moments": {"exp_avg_dtype": torch.bfloat16}, "masters": {"master_weights": True}}
    params = make_params()
    optimizer = FusedAdam(params, **HYPER, **options.get(case, {}))
    optimizer.host = HostState(64) if case == "host" else None
    copies = [torch.zeros_like(param, dtype=torch.bfloat16) for param in params]
    optimizer.copies = dict(zip(params, copies))
    give_grads(0, params)
    optimizer.step()
    assert optimizer.copied == set()
    assert not any(copy.any() for copy in copies)


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_equals_torch(nesterov):
    ours, theirs = make_params(), make_params()
    optimizer = FusedSGD(ours, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    expected = torch.optim.SGD(
        theirs, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov, foreach=False
    )
    for step in range(10):
        give_grads(step, ours, theirs)
        optimizer.step()
        expected.step()
    assert largest_difference(ours, theirs) <= 1e-6
    with pytest.raises(ValueError, match="wd_after_momentum"):
        FusedSGD(ours, lr=0.1, wd_after_momentum=True)
