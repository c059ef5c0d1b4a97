"""What makes a model trainable with FSDP2."""
