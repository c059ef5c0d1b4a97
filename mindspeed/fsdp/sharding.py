"""Apply a plan to a model: recompute, fully_shard from the inside out, prefetch."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.utils import _apply_to_tensors

import mindspeed.device
from mindspeed.config import ConfigError, build
from mindspeed.fsdp.collective_order import synchronize_collectives
from mindspeed.fsdp.options import FsdpOptions
from mindspeed.fsdp.plan import CONTAINERS, DTYPES, ROOT, Plan, make_plan, shard_dim
from mindspeed.fsdp.recompute import recompute

logger = logging.getLogger(__name__)

REPLICATE, EXPERT, ONE = "expert_replicate", "expert", "expert_shard"


def shard(model: nn.Module, options: FsdpOptions) -> Plan:
    """Shard a model in place over all ranks and return the plan that was applied."""
    sharding = Sharding(model, options)
    sharding.recompute()
    sharding.wrap()
    sharding.prefetch()
    return sharding.plan


class Sharding:
    """The steps of sharding a model, in the order of the methods."""

    def __init__(self, model: nn.Module, options: FsdpOptions) -> None:
        """Make the plan, check it, and move ignored modules to the device."""
        self.model = model
        self.plan = make_plan(model, options, torch.distributed.get_world_size())
        device = mindspeed.device.current()
        _check_frozen(self.plan)
        _check_host_backend(options, device)
        ignored = [model.get_submodule(name) for name in self.plan.ignored]
        for module in ignored:
            _move(module, device.torch_device)
            if options.param_dtype and options.cast_forward_inputs:
                _cast_inputs_and_outputs(module, DTYPES[options.param_dtype])
        self.kwargs: dict[str, Any] = {
            "mesh": make_mesh(self.plan, device),
            "mp_policy": mixed_precision(options),
            "offload_policy": offload(options, device),
            "ignored_params": {p for module in ignored for p in module.parameters()},
            "reshard_after_forward": options.reshard_after_forward,
        }
        """Arguments of torch's fully_shard for every module."""

    def change(self, **keys: Any) -> None:
        """Plan again with other values of some options."""
        options = build(FsdpOptions, self.plan.options.model_dump() | keys)
        if any(isinstance(value, list) for value in keys.values()):
            self.plan = make_plan(self.model, options, self.plan.world_size)
        else:  # the modules stay, which by now may be sharded
            self.plan = replace(self.plan, options=options)

    def recompute(self) -> None:
        """Recompute the activations of the modules in recompute_modules."""
        for name in self.plan.recomputed:
            recompute(self.model.get_submodule(name), self.plan.options.use_reentrant)

    def wrap(self, **changed: Any) -> None:
        """Apply fully_shard from the inside out, the root last."""
        _shard_units(self.model, self.plan, self.kwargs | changed)
        synchronize_collectives(self.model, self.plan)
        logger.info(
            "FSDP2: %d unit(s), mesh %d x %d (replicas x shards), %d bytes of weights per rank",
            *(len(self.plan.units), self.plan.replicas, self.plan.shards, self.plan.bytes_per_rank),
        )

    def prefetch(self) -> None:
        """Prefetch in definition order, and after the first pass in the order it took."""
        options = self.plan.options
        units = [self.model.get_submodule(name) for name in self.plan.forward_order]
        _set_prefetch_order(units, options)
        if options.num_to_forward_prefetch or options.num_to_backward_prefetch > 1:
            _follow_first_pass(self.model, units, options)


def make_mesh(plan: Plan, device: mindspeed.device.Device) -> DeviceMesh:
    """Return a mesh in which neighbouring ranks share one replica; several replicas are HSDP."""
    if plan.replicas == 1:
        return init_device_mesh(device.name, (plan.shards,), mesh_dim_names=("shard",))
    shape = (plan.replicas, plan.shards)
    return init_device_mesh(device.name, shape, mesh_dim_names=("replicate", "shard"))


def mixed_precision(options: FsdpOptions) -> MixedPrecisionPolicy:
    """Return torch's policy for the three dtypes and the casting of inputs."""
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
    experts = ExpertSharding(plan, kwargs["mesh"].device_type) if plan.experts else None
    reshard = kwargs["reshard_after_forward"]
    for unit in reversed(plan.units):
        module = model.get_submodule(unit.name)
        if experts is not None and unit.name in plan.experts:
            # A number of ranks refers to the other mesh.
            changed = {"reshard_after_forward": reshard is not False}
            experts.shard(module, **{k: v for k, v in kwargs.items() if k != "mesh"} | changed)
            continue
        # The backward pass begins with the root: None lets torch keep it gathered for that.
        is_kept = unit.name == ROOT and reshard is not False
        fully_shard(module, **kwargs | {"reshard_after_forward": None if is_kept else reshard})


class ExpertSharding:
    """Expert parallelism inside FSDP2: the ranks of an expert group keep different experts.

    A mesh (replicate, expert, one) spans all ranks. Ranks along `replicate` keep the same experts
    and shard them; or replicate them, sharded then along `one`, a dimension of a single rank.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise RuntimeError(
                f"expert_parallel_size needs FSDPModule.set_force_sum_reduction_for_comms, which "
                f"torch {torch.__version__} lacks: install a newer torch"
            )
        self._plan = plan
        size = plan.options.expert_parallel_size
        shape = (plan.world_size // size, size, 1)
        self._mesh = init_device_mesh(device, shape, mesh_dim_names=(REPLICATE, EXPERT, ONE))

    def shard(self, module: Any, **kwargs: Any) -> None:
        """Keep this rank's experts, run ep_forward for forward, and shard what is kept."""
        group = self._mesh[EXPERT]
        for child in module.modules():
            child.expert_shard = (group.get_local_rank(), group.size())
            for key, parameter in child.named_parameters(recurse=False):
                local = parameter.detach().chunk(group.size())[group.get_local_rank()].clone()
                child.register_parameter(key, nn.Parameter(local, parameter.requires_grad))
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
        module.set_gradient_divide_factor(float(self._plan.world_size))
        # Only a sum and a division is something every backend can do; one rank divides anyway,
        # and in torch 2.13 would do it twice.
        module.set_force_sum_reduction_for_comms(shards > 1)

    def _sharding_mesh(self) -> DeviceMesh:
        reshard = self._plan.options.reshard_local_experts
        return self._mesh[REPLICATE] if reshard else self._mesh[REPLICATE, ONE]


def _follow_first_pass(model: nn.Module, units: list[nn.Module], options: FsdpOptions) -> None:
    """Set the prefetch order to the order of the first forward pass."""
    seen: dict[nn.Module, None] = {}

    def record(module: nn.Module, _: Any) -> None:
        seen.setdefault(module)

    def end(*_: Any) -> None:
        for hook in hooks:
            hook.remove()
        if (order := list(seen)) != units:  # units that did not run are gathered on demand
            _set_prefetch_order(order, options)

    hooks = [unit.register_forward_pre_hook(record) for unit in units]
    hooks.append(model.register_forward_hook(end))


def _set_prefetch_order(units: Sequence[nn.Module], options: FsdpOptions) -> None:
    for module, following in _following(units, options.num_to_forward_prefetch):
        module.set_modules_to_forward_prefetch(following)
    if options.num_to_backward_prefetch == 1:
        return  # torch's default, in the actual order of the forward pass
    for module, following in _following(units[::-1], options.num_to_backward_prefetch):
        # An empty list is torch's default of one; a module that names itself, which is gathered
        # by then, prefetches nothing.
        module.set_modules_to_backward_prefetch(following or [module])


def _following(units: Sequence[nn.Module], count: int) -> list[tuple[FSDPModule, list[FSDPModule]]]:
    """Return for every module the next ones of a pass."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    assert len(sharded) == len(units)
    return [(module, sharded[i + 1 : i + 1 + count]) for i, module in enumerate(sharded)]


def _cast_inputs_and_outputs(module: nn.Module, outer: torch.dtype) -> None:
    """Cast the inputs of an ignored module to its own dtype, and its outputs to the model's."""
    if isinstance(module, CONTAINERS):
        for child in module.children():
            _cast_inputs_and_outputs(child, outer)
        return
    inner = next((p.dtype for p in module.parameters() if p.is_floating_point()), outer)
    if inner == outer:
        return

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, inner), _cast(kwargs, inner)

    def cast_output(_: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, outer)

    module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    module.register_forward_hook(cast_output)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, values)


def _check_frozen(plan: Plan) -> None:
    if plan.trainable_ignored:
        raise ConfigError(
            f"ignored_modules contains {plan.trainable_ignored[0]}, which is trainable: its "
            "gradients would not be reduced. Freeze it (requires_grad_(False)) or do not ignore it"
        )


def _check_host_backend(options: FsdpOptions, device: mindspeed.device.Device) -> None:
    """Reject offload without a cpu backend: gradients are then reduced in host memory."""
    if options.offload_to_cpu and "cpu:" not in torch.distributed.get_backend_config():
        host = mindspeed.device.known()["cpu"]
        both = ",".join(dict.fromkeys(f"{d.name}:{d.backend}" for d in (device, host)))
        raise ConfigError(
            "offload_to_cpu needs a process group with a cpu backend: start with "
            f"--distributed-backend {both}"
        )


def _move(module: nn.Module, device: torch.device) -> None:
    """Move an ignored module to the device; on meta it has no data yet and stays."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        module.to(device)
