"""One file a feature: its options, its level, what it needs and excludes, which hooks it uses."""

from mindspeed.features.base import ALL_DEVICES, Context, Effect, Feature, Level, bind

__all__ = ["ALL_DEVICES", "Context", "Effect", "Feature", "Level", "bind"]
