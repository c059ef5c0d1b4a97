"""JSON of files that others have written."""

import json
from typing import Any


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Return what a JSON text holds; for one that no parser can take the error is a ValueError."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
