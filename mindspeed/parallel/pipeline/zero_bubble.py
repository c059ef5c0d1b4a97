"""ZB-H1: Megatron's 1F1B schedule with weight gradients moved into its bubble.

Backward (B) computes gradients of activations and queues those of weights (W) by micro-batch. The
order of F, B and messages is Megatron's own; W runs where a stage would wait:

- behind the gradient that it has just posted to the previous stage, before it waits for anything;
- stage r starts with its W only when r micro-batches wait for theirs, and runs the rest at the end.

With equal costs of F, B and W the bubble falls from 3 (p - 1) to p - 1 units. A stage holds at most
p micro-batches that are not done, which is what the first stage of 1F1B holds.

Each weight gets its gradients in the order of the micro-batches, so sums are those of 1F1B in every
bit. Data-parallel reduction starts when the last of them is there.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed.parallel.tensor.linear import WeightGradient, scheduled_gradients

# What Megatron's config says about data-parallel reduction; the queue decides during a step.
_SYNC = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
# The queue of the train step that runs; None outside of one.
_step: ContextVar[WeightGradientQueue | None] = ContextVar("zero_bubble_step", default=None)


class WeightGradientQueue:
    """Weight gradients of the micro-batches behind backward, oldest first.

    Args:
        delay: micro-batches that wait before the first one is due.
    """

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self._waiting: deque[list[Callable[[], None]]] = deque()
        self._is_posting = False
        self._is_due = False

    def __len__(self) -> int:
        return len(self._waiting)

    def begin_backward(self) -> None:
        """Collect what follows as another micro-batch."""
        self.run_due()  # no more may wait than that, whatever the messages were
        self._waiting.append([])

    def put(self, compute: Callable[[], None]) -> None:
        """Queue one weight gradient of the micro-batch that goes backward."""
        self._waiting[-1].append(compute)

    def posted(self) -> None:
        """Run what is due behind a gradient that is on its way to the previous stage."""
        if self._is_posting:
            self._is_due = True
        else:
            self.run_due()

    @contextmanager
    def posting(self) -> Iterator[None]:
        """Post several messages of one exchange, behind the last of which W runs."""
        self._is_posting, self._is_due = True, False
        try:
            yield
        finally:
            self._is_posting = False
        if self._is_due:
            self.run_due()

    def run_due(self) -> None:
        """Compute the gradients of the oldest micro-batch, if enough of them wait."""
        if len(self._waiting) > self.delay:
            self.run_oldest()

    @torch.no_grad()
    def run_oldest(self) -> None:
        """Compute all weight gradients of the oldest micro-batch."""
        for compute in self._waiting.popleft():
            compute()

    def run_all(self) -> None:
        """Compute what is left."""
        while self._waiting:
            self.run_oldest()


def wrap_get_forward_backward_func(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run 1F1B with the queue; other schedules as they are."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.pipeline_parallel import schedules

        chosen = original(*args, **kwargs)
        one_f_one_b = schedules.forward_backward_pipelining_without_interleaving
        # Other features may have wrapped what was chosen.
        is_chosen = inspect.unwrap(chosen) is inspect.unwrap(one_f_one_b)
        return _zero_bubble(chosen) if is_chosen else chosen

    return get_forward_backward_func


def _zero_bubble(one_f_one_b: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(one_f_one_b)
    def forward_backward(*, model: Any, forward_only: bool = False, **options: Any) -> Any:
        if forward_only:
            return one_f_one_b(model=model, forward_only=True, **options)
        chunk = model[0] if isinstance(model, list) else model
        communicator = options.get("p2p_communicator")
        with _weight_gradients_of(chunk, _stage(communicator)):
            return one_f_one_b(model=model, forward_only=False, **options)

    return forward_backward


def _stage(communicator: Any) -> int:
    from megatron.core import parallel_state

    if communicator is None:
        return int(parallel_state.get_pipeline_model_parallel_rank())
    return int(communicator.pp_group.rank())


@contextmanager
def _weight_gradients_of(model: Any, stage: int) -> Iterator[None]:
    """Queue the weight gradients of a model; its own reduction waits until they are there."""
    from megatron.core.utils import get_model_config

    config = get_model_config(model)
    if config.use_ring_exchange_p2p:
        raise ValueError(
            "zb-h1 needs use_ring_exchange_p2p=False: weight gradients run in its wait"
        )
    queue = WeightGradientQueue(delay=stage)
    weights = [p for p in model.parameters() if p.requires_grad and hasattr(p, "main_grad")]
    kept = {name: getattr(config, name) for name in _SYNC}
    token = _step.set(queue)
    for weight in weights:
        weight.scheduled_gradients = queue

    def finalize(*args: Any, **kwargs: Any) -> None:
        queue.run_all()
        no_sync.close()
        _start_reduction(model, kept["grad_sync_func"])
        if kept["finalize_model_grads_func"] is not None:
            kept["finalize_model_grads_func"](*args, **kwargs)

    no_sync = ExitStack()
    no_sync.enter_context((kept["no_sync_func"] or nullcontext)())
    config.no_sync_func = config.grad_sync_func = None
    config.finalize_model_grads_func = finalize
    try:
        with no_sync:
            yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)
        for weight in weights:
            del weight.scheduled_gradients
        _step.reset(token)


def _start_reduction(model: Any, grad_sync_func: Callable[..., Any] | None) -> None:
    """Start what overlapping reduction would have started in the last backward."""
    if grad_sync_func is not None:
        grad_sync_func(model.parameters())
    elif getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False):
        model.start_grad_sync()


def wrap_backward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Begin another micro-batch; the first stage sends nothing behind which W could run."""

    @functools.wraps(original)
    def backward_step(input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        queue = _step.get()
        if queue is None:
            return original(input_tensor, *args, **kwargs)
        queue.begin_backward()
        gradients = original(input_tensor, *args, **kwargs)
        if queue.delay == 0:
            queue.run_due()
        return gradients

    return backward_step


def posting() -> AbstractContextManager[None]:
    """Post several messages of one exchange, without W between two of them."""
    queue = _step.get()
    return nullcontext() if queue is None else queue.posting()


def wrap_p2p_ops(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run W behind a gradient that was posted to the previous stage, before anything is waited for.

    It starts messages and returns their handles.
    """

    @functools.wraps(original)
    def p2p_ops(*args: Any, **kwargs: Any) -> Any:
        handles = original(*args, **kwargs)
        queue = _step.get()
        if queue is not None and kwargs["tensor_send_prev"] is not None:
            queue.posted()
        return handles

    return p2p_ops


def wrap_linear(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give the linear layers of local specs the queue, which they know nothing of."""
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def linear_with_grad_accumulation_and_async_allreduce(*args: Any, **kwargs: Any) -> Tensor:
        given = parameters.bind(*args, **kwargs)
        given.apply_defaults()
        if scheduled_gradients(given.arguments["weight"]) is None:
            return original(*args, **kwargs)
        return _scheduled_linear(**given.arguments)

    return linear_with_grad_accumulation_and_async_allreduce


def _scheduled_linear(
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    **_: Any,
) -> Tensor:
    """Multiply as Megatron does by a frozen weight, and queue dW."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel import layers

    group = get_tensor_model_parallel_group() if tp_group is None else tp_group
    takes_group = "tp_group" in inspect.signature(layers.linear_with_frozen_weight).parameters
    out = layers.linear_with_frozen_weight(
        input,
        weight.detach(),
        None,
        gradient_accumulation_fusion,
        allreduce_dgrad,
        sequence_parallel,
        **({"tp_group": group} if takes_group else {}),
    )
    gather_group = group if sequence_parallel else None
    plan = WeightGradient(weight, gather_group, gradient_accumulation_fusion, None)
    out = _QueuedGradient.apply(out, input, weight, plan)
    return out if bias is None else out + bias


class _QueuedGradient(Function):
    """The identity on a GEMM's output, whose backward queues the weight gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weight: Tensor, plan: WeightGradient) -> Tensor:
        ctx.save_for_backward(x)
        ctx.plan = plan
        ctx.mark_dirty(out)  # not a view of it: the loss works in place on logits
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return grad, None, ctx.plan.take(x, grad), None
