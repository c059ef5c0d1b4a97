"""Operators: one contract each, several implementations, chosen by device."""
