"""MindSpeed: Megatron on any device, fast."""
