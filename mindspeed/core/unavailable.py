"""The error of a name whose feature is not implemented: at use, not at import."""

from typing import NoReturn


def unavailable(name: str, instead: str) -> NoReturn:
    """Raise an error that names what was requested and what to do."""
    raise NotImplementedError(f"mindspeed does not offer {name} here: {instead}")
