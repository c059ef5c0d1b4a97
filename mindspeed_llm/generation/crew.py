"""The ranks of a generation: the first leads, one decides, all step together."""

from collections.abc import Callable
from typing import Any

import torch

from mindspeed import device
from mindspeed_llm.generation.model import LoadedModel


class Crew:
    """Hands work from the first rank to the others, and choices from the deciding one to all."""

    def __init__(self, model: LoadedModel) -> None:
        from megatron.core import parallel_state

        self.size = torch.distributed.get_world_size()
        self.is_leader = torch.distributed.get_rank() == 0
        is_replica = bool(
            parallel_state.get_tensor_model_parallel_rank()
            or parallel_state.get_data_parallel_rank()
        )
        self.decides = model.is_last and not is_replica

    def share(self, work: Any) -> Any:
        """Return what the leader gives."""
        if self.size == 1:
            return work
        parcel = [work]
        torch.distributed.broadcast_object_list(parcel, src=0)
        return parcel[0]

    def agree(
        self, choice: torch.Tensor | None, shape: tuple[int, ...], stop: Callable[[], bool]
    ) -> tuple[torch.Tensor, bool]:
        """Return the deciding rank's choice and whether the leader wants to stop.

        Numbers travel as float32, which holds every token id, and together: one call a token.
        """
        wants_stop = self.is_leader and stop()
        if self.size == 1:
            assert choice is not None
            return choice, wants_stop
        here = device.current().torch_device
        message = torch.full((1 + torch.Size(shape).numel(),), -torch.inf, device=here)
        message[0] = float(wants_stop)
        if choice is not None:
            message[1:] = choice.flatten()
        torch.distributed.all_reduce(message, torch.distributed.ReduceOp.MAX)
        return message[1:].view(shape), bool(message[0])
