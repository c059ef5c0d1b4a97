"""What every module with weight matrices shares: shards, initialisation, gradients, extra state."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mindspeed import device as devices
from mindspeed.distributed.collectives import group_size
from mindspeed.parallel.tensor import DeferredGradients, dummy_gradient

logger = logging.getLogger(__name__)

# Megatron's name for the generator that is equal on all ranks: what it initialises is a copy on
# every rank and no shard of anything.
_REPLICATED_RNG = "data-parallel-rng"


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return the placeholder that Megatron's own layers hand to autograd for a fused gradient."""
    like = torch.empty(shape, dtype=dtype, device=devices.current().torch_device)
    return dummy_gradient(like, zero)


def default_init_method(weight: Tensor) -> Tensor:
    """Draw from a normal distribution with the standard deviation of Transformer Engine."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


@dataclass(frozen=True)
class ParameterInit:
    """How one parameter gets its first values."""

    fill: Callable[[Tensor], Any]
    random: bool = False
    fp8_meta_index: int | None = None
    """Always None: no parameter is kept in FP8. Megatron's FSDP asks."""


class TransformerEngineBaseModule(nn.Module):
    """Base of the linear modules."""

    fp8 = False
    fp8_calibration = False
    primary_weights_in_fp8 = False
    # Megatron sets it on the instance before the constructor runs where that has no such keyword.
    rng_tracker_name: str | None = None

    def __init__(
        self,
        *,
        parallel_mode: str | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        symmetric_ar_type: str | None = None,
        ub_name: str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f"parallel_mode={parallel_mode!r}: use None, 'column' or 'row'")
        if ub_overlap_ag or ub_overlap_rs or ub_overlap_rs_dgrad or ub_bulk_dgrad or ub_bulk_wgrad:
            raise ValueError(
                f"tp_comm_overlap was asked for {ub_name or name or 'a linear layer'} and needs "
                "the userbuffers of NVIDIA's Transformer Engine: set tp_comm_overlap=False"
            )
        if symmetric_ar_type is not None:
            raise ValueError(
                f"symmetric_ar_type={symmetric_ar_type!r} needs NVIDIA's Transformer Engine: "
                "leave it out for the plain all-reduce"
            )
        self.name = name
        self.ub_name = ub_name
        self.parallel_mode = parallel_mode
        self.tp_group = tp_group
        self.tp_size = group_size(tp_group) if tp_group is not None else tp_size
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.get_rng_state_tracker = get_rng_state_tracker
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self._device = devices.current().torch_device if device is None else device
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        # The input is always kept as it came, so there is nothing to switch.
        self.save_original_input = save_original_input
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None, "recipe": None}
        self.param_init_meta: dict[str, ParameterInit] = {}
        self.weight_names: list[str] = []
        self._deferred = DeferredGradients() if delay_wgrad_compute else None
        self._after_deferred: list[Callable[[], None]] = []

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Name the tensor-parallel ranks once they are known."""
        self.tp_group = tp_group

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise every parameter on a real device, unless that is deferred."""
        if defer_init:
            return
        for name, init in self.param_init_meta.items():
            param = getattr(self, name)
            if param.is_meta:
                param = materialised(param)
                setattr(self, name, param)
            with torch.no_grad(), self._generator() if init.random else nullcontext():
                init.fill(param)

    def backward_dw(self) -> None:
        """Compute the weight gradients that delay_wgrad_compute kept back in the last backward."""
        if self._deferred is None:
            return
        self._deferred.run(self._gemms_per_forward())
        for hook in self._after_deferred:
            hook()

    def _gemms_per_forward(self) -> int:
        return len(self.weight_names)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Add what Megatron's data parallelism does once a delayed gradient is there."""
        self._after_deferred.append(hook)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: without FP8 there are no scales. Megatron calls it while loading."""

    def get_extra_state(self) -> Tensor:
        """Return no bytes, which is how Transformer Engine says that FP8 is off."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Accept the extra state of any checkpoint; scales of an FP8 run do not apply here."""
        if isinstance(state, Tensor) and state.numel():
            _say_once("FP8 scales in the checkpoint are ignored: this run does not use FP8")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Weights converted from elsewhere carry no extra state.
        state_dict.setdefault(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _add_weight(
        self, name: str, shape: tuple[int, int], init_method: Callable[[Tensor], Any] | None
    ) -> None:
        """Create one weight matrix (out, in), marked as the shard that it is."""
        init_method = init_method or default_init_method
        # Any: the marks of Megatron are attributes that torch does not declare.
        param: Any = self._add_parameter(name, shape, init_method, random=True)
        self.weight_names.append(name)
        param.tensor_model_parallel = self.rng_tracker_name != _REPLICATED_RNG
        param.partition_dim = 1 if self.parallel_mode == "row" else 0
        param.partition_stride = 1
        if self._deferred is not None:
            param.skip_backward_post_hook = True

    def _add_bias(self, name: str, size: int) -> None:
        """Create one bias, sharded in a column-parallel module and whole in a row-parallel one."""
        param: Any = self._add_parameter(name, (size,), nn.init.zeros_)
        if self.parallel_mode == "row":
            param.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            param.tensor_model_parallel = True
            param.partition_dim = 0
            param.partition_stride = 1

    def _add_parameter(
        self, name: str, shape: tuple[int, ...], fill: Callable[[Tensor], Any], random: bool = False
    ) -> nn.Parameter:
        param = nn.Parameter(torch.empty(shape, dtype=self.params_dtype, device=self._device))
        self.register_parameter(name, param)
        self.param_init_meta[name] = ParameterInit(fill, random)
        return param

    def _on_meta(self) -> bool:
        """Whether the parameters were asked for on the meta device, to be made real later."""
        return any(param.is_meta for param in self.parameters(recurse=False))

    def _shard(self, size: int, what: str) -> int:
        """Return this rank's part of a dimension."""
        if size % self.tp_size:
            raise ValueError(f"{what}={size} does not split over {self.tp_size} ranks")
        return size // self.tp_size

    def _group(self) -> ProcessGroup | None:
        """Return the tensor-parallel group, or None for a single rank."""
        if self.tp_size > 1 and self.tp_group is None:
            raise RuntimeError(
                f"{type(self).__name__} is one of {self.tp_size} tensor-parallel shards and knows "
                "no process group: call set_tensor_parallel_group() before the first forward"
            )
        return self.tp_group if self.tp_size > 1 else None

    def _generator(self) -> AbstractContextManager[Any]:
        if self.get_rng_state_tracker is None:
            return nullcontext()
        tracker = self.get_rng_state_tracker()
        name = self.rng_tracker_name
        return tracker.fork() if name is None else tracker.fork(name)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def materialised(param: nn.Parameter) -> nn.Parameter:
    """Return a real parameter of the current device for one that is on the meta device."""
    empty = torch.empty_like(param, device=devices.current().torch_device)
    real = nn.Parameter(empty, requires_grad=param.requires_grad)
    real.__dict__.update(param.__dict__)
    return real


def activation_dtype(x: Tensor, param: Tensor) -> torch.dtype:
    """Return the type to compute in: autocast's where it is on, else the parameters'."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return param.dtype
