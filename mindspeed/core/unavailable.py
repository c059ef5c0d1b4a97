"""How a name answers whose feature is not built: at use, not at import."""

from typing import NoReturn


def unavailable(name: str, instead: str) -> NoReturn:
    """Raise one line that says what was asked for and what to do."""
    raise NotImplementedError(f"mindspeed does not offer {name} here: {instead}")
