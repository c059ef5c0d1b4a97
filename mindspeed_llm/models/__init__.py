"""Model families: shape from an HF config, weight-name table, and the Megatron model."""
