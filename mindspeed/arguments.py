"""The flags of the features in `features_manager.FEATURES_LIST`, for another project's parser."""

import argparse

from mindspeed import features_manager
from mindspeed.config import add_flags
from mindspeed.features.registry import combine

__all__ = ["process_args"]


def process_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of every listed feature to a parser, except those that it has; return it."""
    add_flags(parser.add_argument_group("mindspeed"), combine(features_manager.FEATURES_LIST))
    return parser
