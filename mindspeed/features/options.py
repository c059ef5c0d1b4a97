"""All options of all features as one strict object."""

from collections.abc import Iterable
from typing import Literal, cast

from pydantic import create_model

from mindspeed import config
from mindspeed.features.base import Feature


class CommonOptions(config.Options):
    """What belongs to no single feature."""

    optimization_level: Literal[0, 1, 2] = 2
    """Which layers of features may be used. 0: Megatron runs on this device; 1: also the fused
    operators; 2: also the acceleration algorithms."""


def combine(features: Iterable[Feature]) -> type[CommonOptions]:
    """Make one class that has the common options and those of every feature."""
    classes = [feature.Options for feature in features if feature.Options is not None]
    # The last base comes first in the order of fields, which is the order of flags in the help.
    bases = cast(tuple[type[CommonOptions], ...], (*reversed(classes), CommonOptions))
    return create_model("MindSpeedOptions", __base__=bases)
