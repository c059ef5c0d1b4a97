"""Parallel algorithms that take process groups as arguments."""
