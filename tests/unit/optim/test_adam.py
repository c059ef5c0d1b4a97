import pytest
import torch

from mindspeed.optim.adam import AdamHyper, adam_step


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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
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
        adam_step(params, grads, *moments, hyper)
        assert all(torch.equal(a, b) for a, b in zip(grads, given))
    for got, expected in zip(zip(params, *moments), want):
        torch.testing.assert_close(list(got), list(expected), rtol=1e-13, atol=1e-14)


def test_no_parameters():
    adam_step([], [], [], [], AdamHyper(lr=1, betas=(0, 0), eps=1, weight_decay=0, step=1))
