"""The multimodal suite: bring a model, shard it with FSDP2 from a YAML file."""

from mindspeed.compat.stand_ins import serve

serve.serve_training()
