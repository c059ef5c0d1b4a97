"""Experts inside FSDP2: the ranks of an expert group keep different experts.

A mesh (replicate, expert, one) lies over all ranks. Ranks along `replicate` keep the same experts,
and shard them; or copy them, then being sharded along `one`, a dimension of a single rank.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from mindspeed.fsdp.plan import Plan, shard_dim

REPLICATE, EXPERT, ONE = "expert_replicate", "expert", "expert_shard"


class ExpertGroups:
    """The ranks that share the experts, and those that hold the same ones."""

    def __init__(self, plan: Plan, device: str) -> None:
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise RuntimeError(
                f"expert_parallel_size needs FSDPModule.set_force_sum_reduction_for_comms, which "
                f"torch {torch.__version__} lacks: install a newer torch"
            )
        self._plan = plan
        size = plan.options.expert_parallel_size
        shape = (plan.ranks // size, size, 1)
        self._mesh = init_device_mesh(device, shape, mesh_dim_names=(REPLICATE, EXPERT, ONE))

    def shard(self, module: Any, **kwargs: Any) -> None:
        """Keep this rank's experts, run ep_forward for forward, and shard what is kept."""
        group = self._mesh[EXPERT]
        for child in module.modules():
            child.expert_part = (group.get_local_rank(), group.size())
            for key, parameter in child.named_parameters(recurse=False):
                part = parameter.detach().chunk(group.size())[group.get_local_rank()].clone()
                child.register_parameter(key, nn.Parameter(part, parameter.requires_grad))
        module.forward = functools.partial(module.ep_forward, group.get_group())
        mesh = self._sharding_mesh()
        shards = mesh.size(mesh.ndim - 1)
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=lambda parameter: Shard(shard_dim(parameter.shape, shards)),
            **kwargs,
        )
        # A rank's experts see the tokens of its whole group, so the mean is over all ranks.
        module.set_gradient_divide_factor(float(self._plan.ranks))
        # Only a sum and a division is something every backend can do; one rank divides anyway,
        # and in torch 2.13 would do it twice.
        module.set_force_sum_reduction_for_comms(shards > 1)

    def _sharding_mesh(self) -> DeviceMesh:
        reshard = self._plan.options.reshard_local_experts
        return self._mesh[REPLICATE] if reshard else self._mesh[REPLICATE, ONE]
