"""A file of JSON lines, each with the iteration that it is of, which a resumed run goes on with."""

import json
import logging
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.commit import atomic_write_text
from mindspeed.config import parse_json

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends lines; those that an earlier run wrote beyond its last checkpoint are dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, iteration: int) -> None:
        """Keep the lines up to an iteration, none of a run that starts from the beginning."""
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
            kept = [line for line in lines if _iteration(line) <= iteration] if iteration else []
            atomic_write_text(path, "".join(f"{line}\n" for line in kept))

    def append(self, *lines: dict[str, Any]) -> None:
        """Write lines at the end."""
        try:
            # Half of a surrogate pair, which is no UTF-8, is written as JSON escapes it.
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        except OSError as error:  # a full disk does not stop a run until it has to save
            logger.warning("%s: no line is written (%s)", self._path, error.strerror)


def _iteration(line: str) -> float:
    try:
        return float(parse_json(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a killed run left unfinished
