"""Optimizer numerics: updates on lists of tensors, low-precision state."""
