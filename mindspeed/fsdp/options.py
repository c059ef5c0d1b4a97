"""The options of fsdp2_config.yaml."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mindspeed.config import ConfigError, SectionOptions
from mindspeed.fsdp.patterns import Pattern

DtypeName = Literal["bf16", "fp16", "fp32"]


def _sharding_size(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError("give auto (all ranks) or an integer of at least 1")


def _reshard(value: Any) -> Any:
    if isinstance(value, bool) or (type(value) is int and value >= 2):
        return value
    raise ValueError("give true, false, or the number of ranks (at least 2) to reshard to")


class FsdpOptions(SectionOptions):
    """How a model is sharded with FSDP2; modules are named by patterns like model.layers.{0-23}."""

    model: str | None = None
    """Model for `mindspeed-mm plan`: package.module:function or a folder with a config.json."""
    sharding_size: Annotated[Literal["auto"] | int, BeforeValidator(_sharding_size)] = 1
    """Ranks that shard one replica of the model; auto is all, fewer is HSDP, 1 replicates."""
    param_dtype: DtypeName | None = None
    """Compute dtype: that of gathered weights; the sharded weights keep the dtype they have."""
    reduce_dtype: DtypeName | None = None
    """Dtype in which gradients are reduced; default param_dtype."""
    output_dtype: DtypeName | None = None
    """Dtype that the outputs of every sharded module are cast to; default no cast."""
    cast_forward_inputs: bool = True
    """Cast the floating-point inputs of every sharded module to param_dtype."""
    sub_modules_to_wrap: tuple[str, ...] = ()
    """Modules that are sharded as units of their own; the rest is one unit with the root."""
    ignored_modules: tuple[str, ...] = ()
    """Frozen modules that are not sharded."""
    recompute_modules: tuple[str, ...] = ()
    """Modules whose activations are recomputed in the backward pass."""
    use_reentrant: bool = True
    """Recompute with torch's reentrant checkpoint; false uses the non-reentrant one."""
    reshard_after_forward: Annotated[bool | int, BeforeValidator(_reshard)] = True
    """true reshards after the forward (ZeRO-3), false keeps weights (ZeRO-2), N reshards to N."""
    offload_to_cpu: bool = False
    """Keep shards, gradients and optimizer state in host memory."""
    pin_memory: bool = False
    """Pin that host memory, for faster copies; only with offload_to_cpu."""
    num_to_forward_prefetch: int = Field(default=0, ge=0)
    """Sharded modules to prefetch in the forward pass."""
    num_to_backward_prefetch: int = Field(default=1, ge=0)
    """Sharded modules to prefetch in the backward pass; 1 is torch's default."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Expert-parallel ranks; each holds its part of dimension 0 of the weights of moe_modules."""
    moe_modules: tuple[str, ...] = ()
    """Modules of experts; each has ep_forward(ep_group, ...), which replaces forward."""
    reshard_local_experts: bool = True
    """Shard a rank's experts over the ranks that hold the same ones; false replicates them."""

    @field_validator("sub_modules_to_wrap", "ignored_modules", "recompute_modules", "moe_modules")
    @classmethod
    def _is_pattern(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            Pattern(text)
        return value

    @model_validator(mode="after")
    def _experts_are_named(self) -> "FsdpOptions":
        if self.expert_parallel_size > 1 and not self.moe_modules:
            raise ValueError(
                f"expert_parallel_size: {self.expert_parallel_size} needs moe_modules, "
                "the modules that hold the experts"
            )
        return self

    @classmethod
    def _allows_null(cls, name: str) -> bool:
        # An empty sharding_size could mean all ranks just as well: refused.
        return name == "sharding_size" or super()._allows_null(name)

    def mesh_shape(self, world_size: int) -> tuple[int, int]:
        """Return the number of replicas of the model, and of ranks that shard one."""
        size = world_size if self.sharding_size == "auto" else self.sharding_size
        _check_divides("sharding_size", size, world_size)
        _check_divides("expert_parallel_size", self.expert_parallel_size, world_size)
        part = self.reshard_after_forward
        if not isinstance(part, bool) and (size % part or part == size):
            parts = [str(n) for n in range(2, size) if size % n == 0]
            raise ConfigError(
                f"reshard_after_forward: {part} is not a proper divisor of the {size} rank(s) that "
                f"shard the model: use {', '.join([*parts, 'true', 'false'])}"
            )
        return world_size // size, size


def _check_divides(key: str, size: int, world_size: int) -> None:
    if world_size % size:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(f"{key}: {size} does not divide {world_size} rank(s): use {divisors}")
