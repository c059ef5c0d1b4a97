"""The tokenizer package of the megatron.training stand-in."""
