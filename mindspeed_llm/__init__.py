"""The LLM suite: data, checkpoints, training, chat, evaluation."""

from mindspeed.compat import training_name

training_name.serve()
