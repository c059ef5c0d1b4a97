"""Types of the command-line arguments of the Megatron scripts, checked before any work."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def checkout(text: str) -> Path:
    """Parse the folder of a Megatron-LM checkout."""
    folder = Path(text).resolve()
    if not (folder / "megatron/core").is_dir():
        message = f"{text} is no checkout of Megatron-LM: it has no megatron/core"
        raise argparse.ArgumentTypeError(message)
    return folder


def page(text: str) -> Path:
    """Parse an existing file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} does not exist: give the page to update")
    return Path(text)


def results(file: Path) -> dict[str, Any]:
    """Read the output of megatron_suite.py."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        message = f"{file}: cannot be read as results of megatron_suite.py ({error})"
        raise argparse.ArgumentTypeError(message) from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{file}: holds no results of megatron_suite.py")
    return found


def tagged(text: str) -> tuple[str, dict[str, Any]]:
    """Parse TAG=FILE, and read the file."""
    tag, sign, file = text.partition("=")
    if not (tag and sign and file):
        raise argparse.ArgumentTypeError(f"{text}: give TAG=FILE, e.g. core_v0.16.1=results.json")
    return tag, results(Path(file))


def earlier(text: str) -> tuple[Path, dict[str, Any]]:
    """Parse the output file, and read the results of an earlier run if it exists."""
    file = Path(text).resolve()
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {file.parent}")
    return file, results(file) if file.exists() else {}
