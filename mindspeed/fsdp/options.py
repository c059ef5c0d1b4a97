"""The keys of fsdp2_config.yaml, with the document's value ranges and defaults."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mindspeed.config import ConfigError, Options
from mindspeed.fsdp.patterns import Pattern

DtypeName = Literal["bf16", "fp16", "fp32"]


def _sharding_size(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError("give auto (all ranks) or a whole number of at least 1")


def _reshard(value: Any) -> Any:
    if isinstance(value, bool) or (type(value) is int and value >= 2):
        return value
    raise ValueError("give true, false, or the number of ranks (at least 2) to reshard to")


class FsdpOptions(Options):
    """How a model is sharded with FSDP2; modules are named by patterns like model.layers.{0-23}."""

    model: str | None = None
    """The model to plan for: package.module:function or a folder with a config.json."""
    sharding_size: Annotated[Literal["auto"] | int, BeforeValidator(_sharding_size)] = 1
    """Ranks that share one copy of the model; auto is all, fewer than all is HSDP, 1 replicates."""
    param_dtype: DtypeName | None = None
    """Type of gathered weights, so of the computation; the kept shards stay as they were loaded."""
    reduce_dtype: DtypeName | None = None
    """Type in which gradients are reduced; without it param_dtype."""
    output_dtype: DtypeName | None = None
    """Type that the outputs of every sharded module are cast to; without it they are left alone."""
    cast_forward_inputs: bool = True
    """Cast the floating inputs of every sharded module to param_dtype."""
    sub_modules_to_wrap: tuple[str, ...] = ()
    """Modules that are gathered and freed one at a time; the rest is one unit with the root."""
    ignored_modules: tuple[str, ...] = ()
    """Frozen modules that every rank keeps whole."""
    recompute_modules: tuple[str, ...] = ()
    """Modules whose activations are computed again in the backward pass."""
    use_reentrant: bool = True
    """Recompute with the reentrant checkpoint of torch; false takes the other one."""
    reshard_after_forward: Annotated[bool | int, BeforeValidator(_reshard)] = True
    """true frees weights after the forward (ZeRO-3), false keeps them (ZeRO-2), N keeps 1/N."""
    offload_to_cpu: bool = False
    """Keep shards, gradients and optimizer state in host memory."""
    pin_memory: bool = False
    """Lock that host memory, for faster copies; only with offload_to_cpu."""
    num_to_forward_prefetch: int = Field(default=0, ge=0)
    """Sharded modules to gather ahead in the forward pass."""
    num_to_backward_prefetch: int = Field(default=1, ge=0)
    """Sharded modules to gather ahead in the backward pass; 1 is torch's own."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the experts of moe_modules; each holds that part of dimension 0."""
    moe_modules: tuple[str, ...] = ()
    """Modules of experts; each has ep_forward(ep_group, ...) to run in place of forward."""
    reshard_local_experts: bool = True
    """Shard a rank's experts among the ranks that hold the same ones; false replicates them."""

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

    def layout(self, ranks: int) -> tuple[int, int]:
        """Return how many copies of the model the ranks hold, and how many ranks share one."""
        size = ranks if self.sharding_size == "auto" else self.sharding_size
        _must_divide("sharding_size", size, ranks)
        _must_divide("expert_parallel_size", self.expert_parallel_size, ranks)
        part = self.reshard_after_forward
        if not isinstance(part, bool) and (size % part or part == size):
            parts = [str(n) for n in range(2, size) if size % n == 0]
            raise ConfigError(
                f"reshard_after_forward: {part} is no part of the {size} rank(s) that share the "
                f"model: use {', '.join([*parts, 'true', 'false'])}"
            )
        return ranks // size, size


def _must_divide(key: str, size: int, ranks: int) -> None:
    if ranks % size:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ConfigError(f"{key}: {size} does not divide {ranks} rank(s): use {divisors}")
