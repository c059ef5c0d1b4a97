"""Load tasks of lm-evaluation-harness by name or from files of a user, which may run no code."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from mindspeed.config import ConfigError

SUFFIXES = (".yaml", ".yml")
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
"""Options of completions that the engine knows; max_new_tokens is the same as max_gen_toks."""
TRUST = "read it, then give --trust-task-code"


def load_tasks(
    names: Sequence[str], include_path: Sequence[str] = (), *, trust_code: bool = False
) -> list[Any]:
    """Return the tasks and groups with their data, before a model is loaded."""
    from lm_eval.tasks import TaskManager

    folders = list(map(Path, include_path))
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--include-path {folder}: there is no such folder")
    for name in names:
        if name.endswith(SUFFIXES) and not Path(name).is_file():
            raise ConfigError(f"--tasks {name}: there is no such file")
    if not trust_code:
        given = [Path(name) for name in names if name.endswith(SUFFIXES)]
        found = (path for folder in folders for path in sorted(folder.rglob("*")))
        refuse_code([*given, *(path for path in found if path.suffix in SUFFIXES)])
        _sandbox_templates()
    manager = TaskManager(include_path=folders or None, include_defaults=False)
    if not all(name.endswith(SUFFIXES) or name in manager.all_subtasks for name in names):
        manager = TaskManager(include_path=folders or None)  # parses thousands of files
    tasks = [task for name in names for task in _load(manager, name)]
    _check(manager, tasks)
    return tasks


def _load(manager: Any, name: str) -> list[Any]:
    is_file = name.endswith(SUFFIXES)
    if is_file and _is_group(Path(name)):
        raise ConfigError(
            f"--tasks {name} is a group: give its name, and its folder by --include-path"
        )
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
        raise ConfigError(f"--tasks {name} cannot be loaded: {reason_of(error)}") from None
    if name in found["groups"]:
        return [found["groups"][name]]
    return list(found["tasks"].values())


def _check(manager: Any, tasks: list[Any]) -> None:
    """Raise ConfigError for what would end the evaluation, or change its answers."""
    try:
        loaded = manager.load(tasks)["tasks"]
    except ValueError as error:  # one task twice
        raise ConfigError(f"--tasks: {reason_of(error)}") from None
    for name, task in loaded.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(f"--tasks {name} runs what the model writes, which is not supported")
        options = task.config.generation_kwargs or {}
        if task.config.output_type != "generate_until":
            continue
        if unknown := sorted(set(options) - GENERATION - {"max_new_tokens"}):
            raise ConfigError(
                f"--tasks {name}: its generation_kwargs have {', '.join(unknown)}; known are "
                f"{', '.join(sorted(GENERATION))}"
            )


def reason_of(error: Exception) -> str:
    """Return what an exception says in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__


def refuse_code(files: Iterable[Path]) -> None:
    """Raise ConfigError where a file, or one that it includes, names something that is run."""
    from lm_eval.api.registry import METRIC_REGISTRY

    for path in _with_included(files):
        content = _mapping(path)
        for metric in content.get("metric_list") or ():
            name = metric.get("metric") if isinstance(metric, dict) else metric
            if name not in METRIC_REGISTRY or (
                isinstance(metric, dict) and metric.get("hf_evaluate")
            ):
                raise ConfigError(
                    f"{path}: the metric {name} is none of lm_eval's, and would be loaded as "
                    f"code: {TRUST}"
                )
        if content.get("dataset_path") in ("pandas", "pickle"):
            raise ConfigError(f"{path}: unpickling data can run code: {TRUST}")


def _with_included(files: Iterable[Path]) -> Iterator[Path]:
    pending, seen = list(files), set()
    while pending:
        path = pending.pop()
        if path.resolve() in seen or not path.is_file():
            continue
        seen.add(path.resolve())
        yield path
        included = _mapping(path).get("include") or ()
        named = [included] if isinstance(included, str) else included
        pending += [path.parent / str(each) for each in named]


def _mapping(path: Path) -> dict[str, Any]:
    """Return what a file of plain YAML holds; tags such as !function are refused."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{path} would run code, {error.problem}: {TRUST}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no task: give a mapping with task, dataset_path and others")
    return found


def _is_group(path: Path) -> bool:
    """Return whether a file, whatever its tags, has the key of a group."""
    node = yaml.compose(path.read_text(encoding="utf-8"))
    return isinstance(node, yaml.MappingNode) and any(key.value == "group" for key, _ in node.value)


def _sandbox_templates() -> None:
    """Give the harness an environment in which templates reach nothing but what they are given."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    if isinstance(utils.env, SandboxedEnvironment):
        return
    plain = utils.env
    sandbox = SandboxedEnvironment(
        loader=plain.loader,
        undefined=plain.undefined,
        keep_trailing_newline=plain.keep_trailing_newline,
    )
    sandbox.filters |= plain.filters
    utils.env = sandbox
