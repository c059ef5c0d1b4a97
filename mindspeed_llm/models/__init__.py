"""Model families: configuration from an HF config, weight table, and the Megatron model."""
