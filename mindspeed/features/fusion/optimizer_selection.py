"""Which implementation of Adam trains: ours, torch's, or ours with an average of the weights."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.patching import Patch


class OptimizerSelection(Feature):
    """Build another Adam than the one Megatron imported."""

    name = "optimizer_selection"
    title = "Fused EMA AdamW"
    group = "Fusion"
    level = Level.COMPAT
    enabled_by = "optimizer_selection"

    class Options(config.Options):
        """The choice and the decay of the average."""

        optimizer_selection: Literal["fused_adamw", "fused_torch_adamw", "fused_ema_adamw"] = (
            "fused_adamw"
        )
        """The optimizer behind --optimizer adam. fused_adamw: one pass over all weights;
        fused_torch_adamw: torch's; fused_ema_adamw: the first, and an average of the weights."""
        ema_decay: Annotated[float, Field(ge=0, le=1)] = 0.9999
        """The largest decay of the average of fused_ema_adamw; step n uses min(this,
        (1 + n) / (10 + n))."""

    def is_on(self, options: Any, context: Context) -> bool:
        """The default is what Megatron finds under the name of Transformer Engine anyhow."""
        return bool(options.optimizer_selection != "fused_adamw")

    def idle_fields(self, options: Any, is_on: bool) -> tuple[str, ...]:
        """Only one of the choices has an average."""
        return () if options.optimizer_selection == "fused_ema_adamw" else ("ema_decay",)

    def check(self, options: Any, context: Context) -> None:
        """Only Adam has these forms; an average needs its own float32 weights."""
        flag = context.spelling.with_value("optimizer_selection", options.optimizer_selection)
        given = context.argument("optimizer", "adam")
        if given != "adam":
            raise ConfigError(f"{flag} needs --optimizer adam, not {given}: change one of them")
        if context.argument("optimizer_cpu_offload", False):
            raise ConfigError(f"{flag} and --optimizer-cpu-offload exclude each other: drop one")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Replace the imported class."""
        yield Patch.wrap(
            "megatron.core.optimizer:Adam",
            bind(
                "mindspeed.te.pytorch.optimizers.selection:select_adam",
                options.optimizer_selection,
                options.ema_decay,
            ),
            why="Megatron builds the class it imported; no argument names another",
        )
        if options.optimizer_selection == "fused_ema_adamw":
            yield from _checkpoint_patches()


def _checkpoint_patches() -> Iterator[Patch]:
    saving = "mindspeed.te.pytorch.optimizers.ema_checkpoint"
    optimizers = "megatron.core.optimizer"
    distributed = f"{optimizers}.distrib_optimizer:DistributedOptimizer"
    yield Patch.wrap(
        f"{optimizers}.optimizer:MegatronOptimizer.__init__",
        f"{saving}:wrap_optimizer_init",
        why="Megatron creates the two moments itself where it loads a sharded checkpoint",
    )
    yield Patch.wrap(
        f"{distributed}.get_parameter_state_dp_zero",
        f"{saving}:wrap_get_parameter_state",
        why="it names the states to save, and an average is not among them",
    )
    yield Patch.wrap(
        f"{distributed}.load_parameter_state_from_dp_zero",
        f"{saving}:wrap_load_parameter_state",
        why="it names the states to load, and an average is not among them",
    )
    yield Patch.wrap(
        "megatron.training.checkpointing:save_checkpoint",
        f"{saving}:wrap_save_checkpoint",
        why="all ranks must take part in gathering the averaged model",
    )
    yield Patch.wrap(
        "megatron.training.checkpointing:generate_state_dict",
        f"{saving}:wrap_generate_state_dict",
        why="the averaged model is a part of model_optim_rng.pt",
    )
