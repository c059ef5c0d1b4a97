"""What a user can switch: a folder a group, a file a feature with its options, level and hooks."""

from mindspeed.features.base import ALL_DEVICES, Context, Effect, Feature, Level, bind

__all__ = ["ALL_DEVICES", "Context", "Effect", "Feature", "Level", "bind"]
