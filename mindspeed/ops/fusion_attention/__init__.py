"""Attention in every layout, mask and position bias that the documents name."""
