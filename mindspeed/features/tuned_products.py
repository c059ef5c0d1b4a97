"""Products of matrices by the algorithm that is fastest on this device."""

import pkgutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from mindspeed import config
from mindspeed.features.base import Effect, Feature, Level


class TunedProducts(Feature):
    """Try cuBLAS's algorithms for the products that come again and again; keep the fastest."""

    name = "tuned_products"
    title = "Tuned products"
    group = "Affinity"
    level = Level.ALGORITHM
    enabled_by = "tune_products"
    default_devices = ("cuda",)
    devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        tune_products: bool | None = None
        """Try cuBLAS's algorithms for the products of a training step, some seconds in all, and
        keep the fastest of each. Default: on CUDA."""

    def effects(self, options: Any) -> Iterator[Effect]:
        """Let products be tried from now on."""
        yield Effect("recurring products are tried and keep the fastest algorithm", _tuning())


def _tuning() -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = pkgutil.resolve_name("mindspeed.ops.product:tuning")()
    return context
