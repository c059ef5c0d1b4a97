"""One module a model family: how its HF config is read, and its weight table."""
