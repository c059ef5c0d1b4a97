"""YaRN rotary embeddings (DeepSeek) without a GPU."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class YarnOnCpu(Feature):
    """Megatron builds them under `with torch.device(0)`, which no facade can stand in for."""

    name = "yarn_on_cpu"
    title = "YaRN rotary embeddings on cpu"
    group = "Foundation"
    level = Level.COMPAT
    devices = ("cpu",)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the constructor: latent attention does not pass use_cpu_initialization on to it."""
        yield Patch.wrap(
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:"
            "YarnRotaryEmbedding.__init__",
            "mindspeed.compat.yarn_rotary:wrap_init",
            why="torch.device(0) needs an accelerator",
        )
