"""The LLM suite: data, checkpoints, training, chat, evaluation."""

from mindspeed.compat.stand_ins import serve

serve.serve_training()
