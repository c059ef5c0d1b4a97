"""MindSpeed: Megatron on any device, fast."""

import sys
from typing import TYPE_CHECKING

if sys.version_info < (3, 10):  # noqa: UP036  # pip checks it, a checkout is run by any python
    raise ImportError(
        f"MindSpeed needs Python 3.10 to 3.12: {sys.executable} is "
        f"{sys.version_info[0]}.{sys.version_info[1]}"
    )

from mindspeed.lazy_import import lazy_names

if TYPE_CHECKING:
    from mindspeed.api import disable, enable, list_features, report

__all__ = ["disable", "enable", "list_features", "report"]

# `import mindspeed` stays instant, and sub-packages can import each other.
__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "api"))
