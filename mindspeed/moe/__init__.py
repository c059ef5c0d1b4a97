"""Mixture of experts: how tokens reach their experts, and what a layer keeps for backward."""
