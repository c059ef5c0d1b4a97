"""Names of state-space layers that other projects import."""
