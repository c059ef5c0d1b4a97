"""The LLM suite: data, checkpoints, training, chat, evaluation."""

from mindspeed.compat import megatron

megatron.serve_training()
