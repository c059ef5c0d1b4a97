"""Tensors as a checkpoint knows them: experts that ranks keep apart are parts of one tensor."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class StoredForm:
    """Sees this rank's tensors as parts of what is stored."""

    def __init__(self) -> None:
        self._meshes: dict[tuple[str, int], DeviceMesh] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same memory as part of the whole tensor, which other ranks hold the rest of.

        Where ranks share experts, a tensor lies over the ranks that keep the same experts only;
        such a mesh has fewer ranks than there are.
        """
        if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == dist.get_world_size():
            return tensor
        parts = dist.get_world_size() // tensor.device_mesh.size()
        shape = torch.Size([tensor.shape[0] * parts, *tensor.shape[1:]])
        with torch.no_grad():
            return DTensor.from_local(
                tensor.to_local(),
                self._experts_first(tensor.device_mesh.device_type, parts),
                [Shard(0), tensor.placements[0]],
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )

    def _experts_first(self, device: str, parts: int) -> DeviceMesh:
        """Return all ranks as (part of the experts, those that hold the same part)."""
        if (device, parts) not in self._meshes:
            ranks = torch.arange(dist.get_world_size()).view(-1, parts).T
            self._meshes[device, parts] = DeviceMesh(device, ranks.contiguous())
        return self._meshes[device, parts]
