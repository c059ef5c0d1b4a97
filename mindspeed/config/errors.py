"""The one error for everything a user can put right."""


class ConfigError(ValueError):
    """Say what was given, what is allowed and what to do; commands print it and exit with 2."""


def printable(text: str) -> str:
    """Spell out what is no letter to a terminal: names in damaged files may hold anything."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )
