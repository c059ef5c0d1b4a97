"""`mindspeed debug`: settings with which an editor attaches to the ranks."""

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.debug import BASE_PORT

_MAX_RANKS = 65536 - BASE_PORT
_ALL_WORKERS = "Attach to all workers"
_OURS = re.compile(rf"Attach to Worker \d+|{_ALL_WORKERS}")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "debug", help="write the editor settings that attach to each rank", allow_abbrev=False
    )
    parser.add_argument(
        "--vscode",
        type=int,
        metavar="N",
        required=True,
        help="write .vscode/launch.json for N ranks, keeping entries that are not ours",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        default=Path(".vscode/launch.json"),
        help="write there instead",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a file that cannot be merged (a .bak is kept)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the file and print the next steps."""
    if not 1 <= args.vscode <= _MAX_RANKS:
        raise ConfigError(f"--vscode {args.vscode}: give the number of ranks, 1 to {_MAX_RANKS}")
    if args.output.is_dir():
        raise ConfigError(f"--output {args.output} is a folder: give a file, such as launch.json")
    try:
        backup = write_launch_file(args.output, args.vscode, force=args.force)
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}") from error
    if backup is not None:
        print(f"kept the old file as {os.path.relpath(backup)}")
    last = BASE_PORT + args.vscode - 1
    print(f"wrote {args.output}: {args.vscode} ranks on ports {BASE_PORT} to {last}")
    print("start the job with MINDSPEED_DEBUG_RANKS=all (or 0,2 for some), then attach")
    return 0


def write_launch_file(path: Path, world: int, *, force: bool = False) -> Path | None:
    """Write entries for world ranks, keep all others, and return the backup if one was made."""
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
