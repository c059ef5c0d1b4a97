"""Scores of trained models on the tasks of lm-evaluation-harness."""
