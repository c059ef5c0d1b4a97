"""Attention without mask tensors, and the flags that ask for one all the same."""

from collections.abc import Iterator
from typing import Any, Literal

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.parallel.context_parallel import LOCAL, SOCKET, TE
from mindspeed.patching import Patch

NO_MASK = "--no-create-attention-mask-in-dataloader"


class AttentionMask(Feature):
    """Let causal layers read the mask of the batch, where documents are kept apart by it."""

    name = "attention_mask"
    title = "Attention masks"
    group = "Memory"
    level = Level.COMPAT
    megatron_flags = (NO_MASK, "--reset-attention-mask", "--reset-position-ids")

    class Options(config.Options):
        """Which mask attention uses, under the names that the documents use."""

        attention_mask_type: Literal["causal", "general"] = "causal"
        """causal: every token sees those before it, and no mask tensor is read; general: causal
        layers also read the mask of the batch."""

        sparse_mode: Literal[0, 2] = 0
        """Accepted for scripts that use it: causal attention never has a mask tensor, which is what
        2 asks for."""

    def is_on(self, options: Any, context: Context) -> bool:
        """Only a general mask changes anything."""
        return bool(options.attention_mask_type == "general")

    def idle_fields(self, options: Any, is_on: bool) -> tuple[str, ...]:
        """No flag is idle: the values that change nothing describe what happens anyway."""
        return ()

    def check(self, options: Any, context: Context) -> None:
        """A general mask has to exist."""
        if context.argument("create_attention_mask_in_dataloader", True) is False:
            raise ConfigError(
                f"--attention-mask-type general reads a mask that {NO_MASK} does not create: drop "
                "one"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Tell the attention of both specs."""
        yield Patch.wrap(
            f"{TE}.__init__",
            bind(f"{SOCKET}:wrap_init", {"reads_mask": True}),
            why="a causal layer of Megatron passes its mask and says that it is causal",
        )
        yield Patch.wrap(
            f"{LOCAL}.__init__",
            bind(f"{SOCKET}:wrap_local_init", {"reads_mask": True}),
            why="fused softmax of a local spec ignores the mask of a causal layer",
        )
        yield Patch.wrap(
            f"{LOCAL}.forward",
            f"{SOCKET}:wrap_local_forward",
            why="fused softmax of a local spec ignores the mask of a causal layer",
        )
