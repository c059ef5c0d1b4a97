"""Names of context parallelism that other projects import."""
