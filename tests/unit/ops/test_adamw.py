import importlib
import math

import pytest
import torch

from mindspeed.ops import npu_apply_fused_ema_adamw
from mindspeed.ops.adamw import adamw, halves, reference
from mindspeed.ops.adamw.reference import AdamHyper
from tests.unit.ops.pairwise import pairwise


def reference_step(p, g, m, v, hyper):
    """Adam written out for one tensor, as in the paper."""
    beta1, beta2 = hyper.betas
    if not hyper.decoupled:
        g = g + hyper.weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    correct = hyper.bias_correction
    m_hat = m / (1 - beta1**hyper.step) if correct else m
    v_hat = v / (1 - beta2**hyper.step) if correct else v
    update = m_hat / (v_hat.sqrt() + hyper.eps)
    if hyper.decoupled:
        update = update + hyper.weight_decay * p
    return p - hyper.lr * update, m, v


@pairwise(
    pytest.mark.parametrize("weight_decay", [0.0, 0.1]),
    pytest.mark.parametrize("bias_correction", [True, False]),
    pytest.mark.parametrize("decoupled", [True, False]),
)
def test_matches_the_formula(decoupled, bias_correction, weight_decay):
    torch.manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    params = [torch.randn(s, dtype=torch.float64) for s in shapes]
    moments = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    want = [(p.clone(), m.clone(), v.clone()) for p, m, v in zip(params, *moments)]
    for step in range(1, 6):
        hyper = AdamHyper(
            lr=0.05,
            betas=(0.8, 0.95),
            eps=1e-3,
            weight_decay=weight_decay,
            step=step,
            decoupled=decoupled,
            bias_correction=bias_correction,
        )
        grads = [torch.randn_like(p) for p in params]
        want = [reference_step(p, g, m, v, hyper) for (p, m, v), g in zip(want, grads)]
        given = [g.clone() for g in grads]
        adamw(params, grads, *moments, hyper)
        assert all(torch.equal(a, b) for a, b in zip(grads, given))
    for got, expected in zip(zip(params, *moments), want):
        torch.testing.assert_close(list(got), list(expected), rtol=1e-13, atol=1e-14)


def test_no_parameters():
    reference.adamw([], [], [], [], AdamHyper(lr=1, betas=(0, 0), eps=1, weight_decay=0, step=1))


SHAPES = [(33, 7), (5,), (0,), (), (9000,), (3, 4100)]


@pairwise(
    pytest.mark.parametrize("decoupled", [True, False]),
    pytest.mark.parametrize("averaged", [True, False]),
    pytest.mark.parametrize("copy_type", [None, torch.float16]),
    pytest.mark.parametrize("grad_type", [torch.float32, torch.bfloat16]),
)
def test_kernel_equals_float64(grad_type, copy_type, averaged, decoupled):
    from mindspeed.ops.adamw import triton_impl

    torch.manual_seed(0)
    # One tensor starts four bytes off the alignment of the others, one is not contiguous.
    params = [torch.randn(s) for s in SHAPES] + [torch.randn(9)[1:], torch.randn(6, 4).t()]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    averages = [p.clone() for p in params] if averaged else ()
    copies = [torch.full_like(p, torch.nan, dtype=copy_type) for p in params] if copy_type else ()
    exact = [[t.double() for t in tensors] for tensors in (params, *moments, averages)]
    for step in range(1, 4):
        hyper = AdamHyper(
            lr=0.01,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            step=step,
            decoupled=decoupled,
            ema_decay=0.9,
        )
        grads = [torch.randn(p.shape).to(grad_type) for p in params]
        triton_impl.adamw(params, grads, *moments, hyper, averages=averages, copies=copies)
        exact_inputs = [g.double() for g in grads]
        reference.adamw(exact[0], exact_inputs, *exact[1:3], hyper, averages=exact[3])
    for got, want in zip((params, *moments, averages), exact):
        for one, wanted in zip(got, want):
            torch.testing.assert_close(one.double(), wanted, rtol=1e-6, atol=1e-6)
    for copy, param in zip(copies, params):
        assert torch.equal(copy, param.to(copy_type))


def scaled_step(function, scale, grads):
    """Take one step on tensors of all alignments; return everything it may change."""
    torch.manual_seed(1)
    params = [torch.randn(s) for s in SHAPES] + [torch.randn(9)[1:], torch.randn(6, 4).t()]
    moments = [[torch.rand_like(p) for p in params] for _ in range(2)]
    averages = [p.clone() for p in params]
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
    hyper = AdamHyper(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=2, ema_decay=0.9)
    grad_scale = None if scale is None else torch.tensor(scale)
    function(
        *(params, grads, *moments, hyper), averages=averages, copies=copies, grad_scale=grad_scale
    )
    return [*params, *moments[0], *moments[1], *averages, *copies]


@pytest.mark.parametrize("name", ["reference", "triton_impl"])
def test_gradients_are_scaled_and_nan_skips_the_step(name):
    function = importlib.import_module(f"mindspeed.ops.adamw.{name}").adamw
    shapes = [*SHAPES, (8,), (4, 6)]
    grads = [torch.randn(shape) for shape in shapes]
    kept = [grad.clone() for grad in grads]
    before = scaled_step(lambda *a, **k: None, None, grads)
    assert all(map(torch.equal, scaled_step(function, math.nan, grads), before))
    halved = scaled_step(function, 0.5, grads)
    assert all(map(torch.equal, halved, scaled_step(function, None, [g * 0.5 for g in grads])))
    assert not all(map(torch.equal, halved, scaled_step(function, 1.0, grads)))
    assert all(map(torch.equal, grads, kept))


@pytest.mark.parametrize("mode", [0, 1])
def test_ema_call_of_the_documents(mode):
    torch.manual_seed(0)
    var, m, v = torch.randn(4, 3), torch.rand(4, 3), torch.rand(4, 3)
    grad, s = torch.randn(4, 3), torch.randn(4, 3)
    hyper = AdamHyper(
        lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, step=7, decoupled=mode == 1
    )
    exact_inputs = [t.double() for t in (var, grad, m, v)]
    want = reference_step(*exact_inputs, hyper)
    want_average = 0.75 * s.double() + 0.25 * want[0]
    step = torch.tensor([7])
    given = npu_apply_fused_ema_adamw(
        grad, var, m, v, s, step, 0.1, 0.75, 0.8, 0.9, 1e-3, mode, True, 0.2
    )
    for got, given_tensor, wanted in zip(given, (var, m, v, s), (*want, want_average)):
        assert got is given_tensor
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-7)


HYPER = {"lr": 1.0, "betas": (0.9, 0.9), "eps": 1.0, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("changes", "hyper", "message"),
    [
        ({"grads": []}, {}, "1 params and 0 grads"),
        ({"grads": [torch.ones(3)]}, {}, "grads of the same shapes"),
        ({"exp_avgs": [torch.ones(2).half()]}, {}, "exp_avgs of the dtype of the params"),
        ({"averages": [torch.ones(2)] * 2}, {}, "1 params and 2 averages"),
        ({}, {"step": 0}, "steps from 1, got 0"),
        ({}, {"ema_decay": 1.5}, "from 0 to 1, got 1.5"),
    ],
)
def test_illegal_input_is_refused(changes, hyper, message):
    lists = {name: [torch.ones(2)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    with pytest.raises(ValueError, match=message):
        adamw(**(lists | changes), hyper=AdamHyper(**(HYPER | {"step": 1} | hyper)))


@pytest.mark.parametrize(
    ("step", "mode", "message"),
    [
        (torch.tensor([1, 2]), 1, "one integer, got 2"),
        (torch.tensor([1.0]), 1, "one integer, got 1 of torch.float32"),
        (torch.tensor([1]), 2, r"mode must be 0 \(L2\) or 1 \(AdamW\), got 2"),
    ],
)
def test_illegal_ema_call_is_refused(step, mode, message):
    with pytest.raises(ValueError, match=message):
        npu_apply_fused_ema_adamw(*(torch.ones(2) for _ in range(5)), step, mode=mode)
    with pytest.raises(ValueError, match=message):
        options = 0.1, 0.9, 0.9, 0.9, 1e-8, mode
        npu_apply_fused_ema_adamw(*(torch.ones(2) for _ in range(5)), step, *options)


def all_bits_of_one_pair():
    """Return every float32 between two even bfloat16 numbers, and others of all exponents."""
    bits = torch.arange(0x3F80_0000, 0x3F82_0001, dtype=torch.int32)
    torch.manual_seed(0)
    others = torch.randint(-(2**31), 2**31 - 1, (100_000,)).to(torch.int32)
    ties = (others & ~0xFFFF) | 0x8000
    weights = torch.cat([bits, bits | -(2**31), others, ties]).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38, math.inf, -math.inf])
    weights = torch.cat([weights, edges])
    return weights[~weights.isnan()]


def test_weights_are_split_without_loss_and_rounded_as_torch_rounds():
    weights = all_bits_of_one_pair()
    param, remainder, is_above = halves.split_weight(weights)
    assert remainder.dtype == torch.int16 and is_above.any()
    assert torch.equal(param.view(torch.int16), weights.bfloat16().view(torch.int16))
    joined = halves.join_weight(param, remainder, is_above)
    assert torch.equal(joined.view(torch.int32), weights.view(torch.int32))
    not_a_number = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    param, remainder, is_above = halves.split_weight(not_a_number)
    assert param.isnan().all() and halves.join_weight(param, remainder, is_above).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_marks_are_apart_from_the_moment(dtype):
    moment = torch.tensor([0.0, 1.0, 2.0, 0.0])
    moment = (moment.to(torch.float8_e4m3fn) if dtype == torch.uint8 else moment).view(-1)
    moment = moment.view(dtype) if dtype == torch.uint8 else moment.to(dtype)
    expected, marks = moment.clone(), torch.tensor([True, False, True, False])
    halves.set_marks(moment, marks)
    assert torch.equal(halves.marks_of(moment), marks)
    assert torch.equal(halves.without_marks(moment), expected)
    halves.set_marks(moment, ~marks)
    assert torch.equal(halves.marks_of(moment), ~marks)


@pytest.mark.parametrize("name", ["reference", "triton_impl"])
@pytest.mark.parametrize("scale", [None, 0.5, math.nan])
def test_halves_are_updated_as_whole_weights(name, scale):
    """In every bit, by either implementation; most weights start and stay half way."""
    function = importlib.import_module(f"mindspeed.ops.adamw.{name}").adamw
    torch.manual_seed(0)
    whole = [torch.randn(s) for s in SHAPES]
    for weight in whole:
        weight.view(torch.int32).bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
    grads = [torch.randn_like(w) * (torch.rand_like(w) > 0.7) for w in whole]
    moments = [[torch.zeros_like(w) for w in whole] for _ in range(2)]
    params, remainders, marks = map(list, zip(*map(halves.split_weight, whole)))
    ours = [[torch.zeros_like(w) for w in whole] for _ in range(2)]
    for moment, mark in zip(ours[1], marks):
        halves.set_marks(moment, mark)
    scale = None if scale is None else torch.tensor(scale)
    for step in range(1, 4):
        hyper = AdamHyper(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=step)
        function(whole, grads, *moments, hyper, grad_scale=scale)
        function(params, grads, *ours, hyper, remainders=remainders, grad_scale=scale)
    rows = zip(params, remainders, *ours, whole, *moments)
    ties = 0
    for param, remainder, first, second, weight, first_whole, second_whole in rows:
        is_above = halves.marks_of(second)
        ties += int(is_above.sum())
        assert torch.equal(halves.join_weight(param, remainder, is_above), weight)
        assert torch.equal(param, weight.bfloat16()) and torch.equal(first, first_whole)
        assert torch.equal(halves.without_marks(second), second_whole)
    assert ties > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": torch.float32}, "int16 remainders of params of bfloat16"),
        ({"remainders": torch.int32}, "int16 remainders of params of bfloat16"),
        ({"copies": torch.bfloat16}, "neither averages nor copies"),
    ],
)
def test_wrong_halves_are_refused(change, message):
    dtypes = {"params": torch.bfloat16, "remainders": torch.int16} | change
    lists = {name: [torch.zeros(3, dtype=dtype)] for name, dtype in dtypes.items()}
    moments = [[torch.zeros(3)] for _ in range(3)]
    hyper = AdamHyper(lr=1, betas=(0, 0), eps=1, weight_decay=0, step=1)
    with pytest.raises(ValueError, match=message):
        adamw(lists.pop("params"), *moments, hyper, **lists)
