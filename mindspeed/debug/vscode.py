"""The launch.json with which VS Code attaches to each rank."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.debug.attach import BASE_PORT

_ALL_WORKERS = "Attach to all workers"
_OURS = re.compile(rf"Attach to Worker \d+|{_ALL_WORKERS}")


def write_launch_file(path: Path, world: int, *, force: bool = False) -> Path | None:
    """Put entries for world ranks into path, keep everybody else's, and return a backup if made."""
    path = path.resolve()
    backup = None
    try:
        settings = merge(read_launch_file(path), world)
    except ConfigError as error:
        if not force:
            raise ConfigError(
                f"{error}; --force replaces the file and keeps the old one beside it"
            ) from error
        backup = _back_up(path)
        settings = merge({}, world)
    _write(path, json.dumps(settings, indent=2) + "\n")
    return backup


def read_launch_file(path: Path) -> dict[str, Any]:
    """Read an existing launch.json; a missing one is empty."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, UnicodeDecodeError) as error:
        reason = f"{path} is not plain JSON (comments cannot be kept): {error}"
        raise ConfigError(reason) from error
    lists = ("configurations", "compounds")
    if not isinstance(settings, dict) or not all(
        isinstance(settings.get(name, []), list) for name in lists
    ):
        raise ConfigError(f"{path} is not a VS Code launch file: expected lists under {lists}")
    return settings


def merge(settings: dict[str, Any], world: int) -> dict[str, Any]:
    """Return settings with our entries for world ranks in place of earlier ones of ours."""
    workers = [_worker(rank) for rank in range(world)]
    together = {"name": _ALL_WORKERS, "configurations": [worker["name"] for worker in workers]}
    return {
        "version": "0.2.0",
        **settings,
        "configurations": [*_others(settings, "configurations"), *workers],
        "compounds": [*_others(settings, "compounds"), together],
    }


def _others(settings: dict[str, Any], key: str) -> list[Any]:
    def ours(entry: Any) -> bool:
        name = entry.get("name") if isinstance(entry, dict) else None
        return isinstance(name, str) and _OURS.fullmatch(name) is not None

    return [entry for entry in settings.get(key, []) if not ours(entry)]


def _worker(rank: int) -> dict[str, Any]:
    return {
        "name": f"Attach to Worker {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "localhost", "port": BASE_PORT + rank},
        "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": "."}],
    }


def _back_up(path: Path) -> Path:
    number = 0
    while (backup := path.with_name(f"{path.name}.bak{number or ''}")).exists():
        number += 1
    shutil.copy2(path, backup)
    return backup


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed: an editor that watches the file never sees half of it.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
