"""The LLM suite: data, checkpoints, training, chat, evaluation."""
