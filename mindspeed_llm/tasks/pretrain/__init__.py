"""Pretraining."""
