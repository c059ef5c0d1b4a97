"""Mixins that make a model trainable with FSDP2."""
