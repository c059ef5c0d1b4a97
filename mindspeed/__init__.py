"""MindSpeed: Megatron on any device, fast."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed.api import disable, enable, list_features, report

__all__ = ["disable", "enable", "list_features", "report"]


def __getattr__(name: str) -> Any:
    # Loaded at first use: `import mindspeed` stays instant, and sub-packages can import each other.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mindspeed import api

    return getattr(api, name)
