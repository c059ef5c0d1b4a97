"""Carry out a plan: recompute, then fully_shard from the inside out, then prefetch."""

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

import mindspeed.device
from mindspeed.config import ConfigError, build
from mindspeed.fsdp.agreement import agree_on_collectives
from mindspeed.fsdp.borders import cast_at_border
from mindspeed.fsdp.experts import ExpertGroups
from mindspeed.fsdp.options import FsdpOptions
from mindspeed.fsdp.plan import DTYPES, ROOT, Plan, make_plan
from mindspeed.fsdp.prefetch import prefetch
from mindspeed.fsdp.recompute import recompute

logger = logging.getLogger(__name__)


def shard(model: nn.Module, options: FsdpOptions) -> Plan:
    """Shard a model in place over all ranks and return the plan that was carried out."""
    sharding = Sharding(model, options)
    sharding.recompute()
    sharding.wrap()
    sharding.prefetch()
    return sharding.plan


class Sharding:
    """The steps of sharding a model, in the order of the methods."""

    def __init__(self, model: nn.Module, options: FsdpOptions) -> None:
        """Make the plan, check it, and bring what is ignored to the device."""
        self.model = model
        self.plan = make_plan(model, options, torch.distributed.get_world_size())
        device = mindspeed.device.current()
        _must_be_frozen(self.plan)
        _must_reach_the_host(options, device)
        ignored = [model.get_submodule(name) for name in self.plan.ignored]
        for module in ignored:
            _move(module, device.torch_device)
            if options.param_dtype and options.cast_forward_inputs:
                cast_at_border(module, DTYPES[options.param_dtype])
        self.kwargs: dict[str, Any] = {
            "mesh": make_mesh(self.plan, device),
            "mp_policy": mixed_precision(options),
            "offload_policy": offload(options, device),
            "ignored_params": {p for module in ignored for p in module.parameters()},
            "reshard_after_forward": options.reshard_after_forward,
        }
        """What torch's fully_shard is given for every module."""

    def change(self, **keys: Any) -> None:
        """Plan again with other values of some keys."""
        options = build(FsdpOptions, self.plan.options.model_dump() | keys)
        if any(isinstance(value, list) for value in keys.values()):
            self.plan = make_plan(self.model, options, self.plan.ranks)
        else:  # the modules stay, which by now may be sharded
            self.plan = replace(self.plan, options=options)

    def recompute(self) -> None:
        """Recompute the activations of the modules named so."""
        for name in self.plan.recomputed:
            recompute(self.model.get_submodule(name), self.plan.options.use_reentrant)

    def wrap(self, **changed: Any) -> None:
        """Apply fully_shard from the inside out, the root last."""
        _shard_units(self.model, self.plan, self.kwargs | changed)
        agree_on_collectives(self.model, self.plan)
        logger.info(
            "FSDP2: %d unit(s) over %d x %d rank(s), %d bytes of weights a rank",
            *(len(self.plan.units), self.plan.replicas, self.plan.shards, self.plan.held),
        )

    def prefetch(self) -> None:
        """Have modules gathered ahead of their use."""
        prefetch(self.model, self.plan)


def make_mesh(plan: Plan, device: mindspeed.device.Device) -> DeviceMesh:
    """Lay neighbouring ranks around one copy of the model; several copies make it HSDP."""
    if plan.replicas == 1:
        return init_device_mesh(device.name, (plan.shards,), mesh_dim_names=("shard",))
    shape = (plan.replicas, plan.shards)
    return init_device_mesh(device.name, shape, mesh_dim_names=("replicate", "shard"))


def mixed_precision(options: FsdpOptions) -> MixedPrecisionPolicy:
    """Return torch's policy for the three types and the casting of inputs."""
    return MixedPrecisionPolicy(
        param_dtype=DTYPES.get(options.param_dtype or ""),
        reduce_dtype=DTYPES.get(options.reduce_dtype or ""),
        output_dtype=DTYPES.get(options.output_dtype or ""),
        cast_forward_inputs=options.cast_forward_inputs,
    )


def offload(options: FsdpOptions, device: mindspeed.device.Device) -> OffloadPolicy:
    """Return torch's policy; without an accelerator no memory can be pinned for it."""
    if not options.offload_to_cpu:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=options.pin_memory and device.name != "cpu")


def _shard_units(model: nn.Module, plan: Plan, kwargs: dict[str, Any]) -> None:
    experts = ExpertGroups(plan, kwargs["mesh"].device_type) if plan.experts else None
    reshard = kwargs["reshard_after_forward"]
    for unit in reversed(plan.units):
        module = model.get_submodule(unit.name)
        if experts is not None and unit.name in plan.experts:
            # A number of ranks is about the other mesh.
            changed = {"reshard_after_forward": reshard is not False}
            experts.shard(module, **{k: v for k, v in kwargs.items() if k != "mesh"} | changed)
            continue
        # The backward pass begins with the root: None lets torch keep it gathered for that.
        is_kept = unit.name == ROOT and reshard is not False
        fully_shard(module, **kwargs | {"reshard_after_forward": None if is_kept else reshard})


def _must_be_frozen(plan: Plan) -> None:
    if plan.trained_ignored:
        raise ConfigError(
            f"ignored_modules holds {plan.trained_ignored[0]}, which is trained: nothing would "
            "bring its gradients together. Freeze it (requires_grad_(False)) or do not ignore it"
        )


def _must_reach_the_host(options: FsdpOptions, device: mindspeed.device.Device) -> None:
    """With offload, gradients are summed up in host memory, which not every backend can."""
    if options.offload_to_cpu and "cpu:" not in torch.distributed.get_backend_config():
        host = mindspeed.device.known()["cpu"]
        both = ",".join(dict.fromkeys(f"{d.name}:{d.backend}" for d in (device, host)))
        raise ConfigError(
            "offload_to_cpu needs a process group that also talks from host memory: start with "
            f"--distributed-backend {both}"
        )


def _move(module: nn.Module, where: torch.device) -> None:
    """Bring the ignored to the device; what is on meta has no data yet and stays."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        module.to(where)
