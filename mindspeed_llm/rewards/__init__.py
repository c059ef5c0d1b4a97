"""Rewards of completions that a user's function computes."""
