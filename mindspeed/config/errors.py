"""The one error for everything a user can put right."""


class ConfigError(ValueError):
    """Say what was given, what is allowed and what to do; commands print it and exit with 2."""
