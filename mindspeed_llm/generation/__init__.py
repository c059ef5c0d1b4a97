"""Text generation: greedy, sampling or beam search, with a KV cache, on one or more ranks."""
