"""Multimodal models: registry, weights, loss and FSDP2 mixins."""
