"""What happens to Megatron's gradient and parameter buckets, in the order it happens."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.gpt.training import Training


def buckets(training: "Training") -> list[Any]:
    """Return all buckets of this rank."""
    groups = [group for chunk in training.wrapped for group in chunk.bucket_groups]
    return [bucket for group in groups for bucket in group.buckets]


def foreign_shards(training: "Training") -> Iterator[torch.Tensor]:
    """Yield the parts of the parameters that other data-parallel ranks update."""
    from megatron.core import parallel_state

    mine = parallel_state.get_data_parallel_rank()
    for bucket in buckets(training):
        for rank, part in enumerate(bucket.param_data.chunk(training.layout.dp)):
            if rank != mine:
                yield part


class BucketEvents:
    """Records ("reduce" or "gather", bucket) for each collective on a bucket, from now on.

    A collective that the caller waits for is recorded as "blocking reduce" or "blocking gather".
    """

    def __init__(self, training: "Training") -> None:
        from megatron.core.distributed import param_and_grad_buffer

        self.log: list[tuple[str, int]] = []
        found = buckets(training)
        grads = {bucket.grad_data.data_ptr(): i for i, bucket in enumerate(found)}
        self._watch(param_and_grad_buffer, "dist_reduce_scatter_func", "reduce", 1, grads)
        self._watch(torch.distributed, "all_reduce", "reduce", 0, grads)
        if training.layout.distributed_optimizer:
            params = {bucket.param_data.data_ptr(): i for i, bucket in enumerate(found)}
            self._watch(param_and_grad_buffer, "dist_all_gather_func", "gather", 0, params)

    def _watch(
        self, module: Any, name: str, what: str, position: int, places: dict[int, int]
    ) -> None:
        """Record calls of module.name whose argument at the position is the data of a bucket."""
        original = getattr(module, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            bucket = places.get(args[position].data_ptr())
            if bucket is not None:
                self.log.append((what if kwargs["async_op"] else f"blocking {what}", bucket))
            return original(*args, **kwargs)

        setattr(module, name, recorded)
