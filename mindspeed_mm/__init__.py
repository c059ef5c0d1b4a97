"""The multimodal suite: bring a model, shard it with FSDP2 from a YAML file."""

from mindspeed.compat import megatron

megatron.serve_training()
