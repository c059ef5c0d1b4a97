"""Less memory for the same numbers: recompute, swap to the host, one copy of the parameters."""
