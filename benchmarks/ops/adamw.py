"""A step of AdamW: weights, gradient and two moments read, three written; an average, a copy."""

import torch
from op_case import Case, Work, compiled

from mindspeed.ops.adamw import adamw
from mindspeed.ops.adamw.reference import AdamHyper

HYPER = AdamHyper(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, ema_decay=0.999)
LISTS = 4  # params, grads, two moments


def ours(params, grads, exp_avgs, exp_avg_sqs, averages, copies):
    """Move every byte once."""
    adamw(params, grads, exp_avgs, exp_avg_sqs, HYPER, averages=averages, copies=copies)
    return (*params, *averages, *copies)


def fused_torch(params, grads, exp_avgs, exp_avg_sqs, averages, copies):
    """Step as torch.optim.AdamW(fused=True), then what it does not do."""
    beta1, beta2 = HYPER.betas
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [torch.full((), float(HYPER.step), device=p.device) for p in params],
        lr=HYPER.lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=HYPER.weight_decay,
        eps=HYPER.eps,
        amsgrad=False,
        maximize=False,
    )
    if averages:
        torch._foreach_lerp_(averages, params, 1 - HYPER.ema_decay)
    if copies:
        torch._foreach_copy_(copies, params)
    return (*params, *averages, *copies)


def formula(params, grads, exp_avgs, exp_avg_sqs, averages, copies):
    """Step as the paper writes it."""
    (beta1, beta2), (first, second) = HYPER.betas, HYPER.corrections
    for i, (param, grad) in enumerate(zip(params, grads)):
        exp_avgs[i].mul_(beta1).add_((1 - beta1) * grad)
        exp_avg_sqs[i].mul_(beta2).add_((1 - beta2) * grad**2)
        update = exp_avgs[i] / first / ((exp_avg_sqs[i] / second).sqrt() + HYPER.eps)
        param.sub_(HYPER.lr * (update + HYPER.weight_decay * param))
        if averages:
            averages[i].mul_(HYPER.ema_decay).add_((1 - HYPER.ema_decay) * param)
        if copies:
            copies[i].copy_(param)
    return (*params, *averages, *copies)


def case(name, tensors, elements, averaged=False, copied=False):
    """Measure tensors of equal size."""

    def inputs_of(elements):
        def make_inputs(device):
            lists = [
                [torch.rand(elements, device=device) for _ in range(tensors)] for _ in range(LISTS)
            ]
            averages = [p.clone() for p in lists[0]] if averaged else []
            copies = [p.bfloat16() for p in lists[0]] if copied else []
            return *lists, averages, copies

        return make_inputs

    bytes_each = 28 + 8 * averaged + 2 * copied
    return Case(
        op=name,
        shape=f"{tensors}x{elements}",
        dtype=torch.float32,
        tolerance=5e-3 if copied else 1e-6,
        make_inputs=inputs_of(elements),
        gate_inputs=inputs_of(min(elements, 4099)),
        peers={"ours": ours, "fused torch": fused_torch, "compile": compiled(fused_torch)},
        reference=formula,
        work={"fwd": Work(bytes=bytes_each * tensors * elements)},
    )


CASES = [
    case("adamw", 28, 1000),  # launch-bound
    case("adamw", 196, 7_654_400),
    case("adamw_copy", 196, 7_654_400, copied=True),
    case("adamw_ema_copy", 196, 7_654_400, averaged=True, copied=True),
]
TINY = [case("adamw", 3, 24), case("adamw_ema_copy", 3, 24, averaged=True, copied=True)]
