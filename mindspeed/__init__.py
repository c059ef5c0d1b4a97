"""MindSpeed: Megatron on any device, fast."""

from typing import TYPE_CHECKING

from mindspeed.lazy_import import lazy_names

if TYPE_CHECKING:
    from mindspeed.api import disable, enable, list_features, report

__all__ = ["disable", "enable", "list_features", "report"]

# `import mindspeed` stays instant, and sub-packages can import each other.
__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "api"))
