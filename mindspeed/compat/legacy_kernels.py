"""The loader of Megatron-LM's legacy CUDA kernels, of which none are left."""

from __future__ import annotations

import argparse


def load(args: argparse.Namespace) -> None:
    """Do nothing: there is nothing to compile."""
