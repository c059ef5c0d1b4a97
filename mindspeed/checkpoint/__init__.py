"""Distributed checkpoints (DCP) read without running anything that is in them."""
