"""Generate text: greedy, sampled or by beam search, with a cache, over the ranks of a layout."""
