"""Load tasks of lm-evaluation-harness by name or from files of a user."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError

CODE = re.compile(r"!function\s+\S+")
INCLUDE = re.compile(r"^include:\s*[\"']?([^\"'\s#]+)", re.MULTILINE)
GROUP = re.compile(r"^group:", re.MULTILINE)
SUFFIXES = (".yaml", ".yml")


def load_tasks(
    names: Sequence[str], include_path: Sequence[str] = (), *, trust_code: bool = False
) -> list[Any]:
    """Return the tasks and groups with their data, before a model is loaded."""
    from lm_eval.tasks import TaskManager

    files = [Path(name) for name in names if name.endswith(SUFFIXES)]
    for folder in map(Path, include_path):
        if not folder.is_dir():
            raise ConfigError(f"--include-path {folder}: there is no such folder")
        files += [path for path in folder.rglob("*") if path.suffix in SUFFIXES]
    if not trust_code:
        _refuse_code(files)
    folders = list(include_path) or None
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not all(_is_own(manager, name) for name in names):
        manager = TaskManager(include_path=folders)  # parses thousands of files, for seconds
    return [task for name in names for task in _load(manager, name)]


def _is_own(manager: Any, name: str) -> bool:
    """Return whether a task is a user's; groups may name tasks of the harness."""
    if not name.endswith(SUFFIXES):
        return name in manager.all_subtasks
    return Path(name).is_file() and GROUP.search(_read(Path(name))) is None


def _load(manager: Any, name: str) -> list[Any]:
    is_file = name.endswith(SUFFIXES)
    if is_file and not Path(name).is_file():
        raise ConfigError(f"--tasks {name}: there is no such file")
    if not is_file and name not in manager.task_index:
        nearest = difflib.get_close_matches(name, manager.all_tasks, 3)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "use one of lm_eval's"
        raise ConfigError(
            f"--tasks {name}: no task has this name; {hint} (`lm-eval ls tasks` lists them; "
            "--include-path adds your own)"
        )
    try:
        found = manager.load([name])
    except Exception as error:  # YAML, Jinja, and whatever loads the data raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--tasks {name} cannot be loaded: {reason}") from None
    if name in found["groups"]:
        return [found["groups"][name]]
    return list(found["tasks"].values())


def _refuse_code(files: Iterable[Path]) -> None:
    """Raise ConfigError where a file, or one that it includes, names a function to run."""
    for path in _with_included(files):
        if (found := CODE.search(_read(path))) is not None:
            raise ConfigError(
                f"{path} would run the code that it names, {found[0]}: read it, then give "
                "--trust-task-code"
            )


def _with_included(files: Iterable[Path]) -> Iterator[Path]:
    pending, seen = list(files), set()
    while pending:
        path = pending.pop()
        if path.resolve() in seen or not path.is_file():
            continue
        seen.add(path.resolve())
        yield path
        pending += [path.parent / name for name in INCLUDE.findall(_read(path))]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
