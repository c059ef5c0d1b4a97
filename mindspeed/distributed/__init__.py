"""Ranks and how they share a run: parallel sizes, process groups, collectives, seeds per rank."""
