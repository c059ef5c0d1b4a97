"""Forward and backward of an operator, with the same incoming gradients at every call."""

import torch


def run(function, inputs):
    """Return the outputs of a function and the gradients of its inputs."""
    given = [x.detach().requires_grad_() for x in inputs]
    outs = function(*given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.manual_seed(1)
    grads = [torch.randn(o.shape, device="cuda", dtype=torch.float32).to(o.dtype) for o in outs]
    torch.autograd.backward(outs, grads)
    return [*(o.detach() for o in outs), *(x.grad for x in given)]
