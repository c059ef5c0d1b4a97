"""The features as a list, under the names by which mcore-bridge and ms-swift read them."""

from mindspeed.features.base import Feature
from mindspeed.features.registry import registry

__all__ = ["FEATURES_LIST", "create_features_list"]


def create_features_list() -> list[Feature]:
    """Return every feature, lowest level first."""
    return list(registry())


FEATURES_LIST: list[Feature] = create_features_list()
