"""The multimodal suite: bring a model, shard it with FSDP2 from a YAML file."""
