"""Find the installed megatron-core and check, before any of it is imported, that it is usable."""

import dataclasses
import importlib.util
import re
from pathlib import Path

from packaging.version import Version

OLDEST = Version("0.12.1")
NEWEST_WITHOUT_TRITON = Version("0.16.1")
"""Later releases may import triton on every machine; their files are searched for it."""

_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")
# Only imports at the start of a line: one inside try, if or a function may fail or never run.
_IMPORT = re.compile(
    r"^(?:from\s+([.\w]+)\s+import\s+(\([^)]*\)|.*)|import\s+([.\w]+))", re.MULTILINE
)


def location() -> Path | None:
    """Return the folder of megatron.core that `import` would use, or None."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def version() -> Version:
    """Return the version of that megatron-core; RuntimeError if there is none."""
    folder = location()
    if folder is None:
        raise RuntimeError(f"megatron-core is not installed: pip install 'megatron-core>={OLDEST}'")
    # Read from the file: an import would load all of Megatron, and the installer's records describe
    # another copy when a source checkout comes first on the path.
    try:
        text = (folder / "package_info.py").read_text()
        values = dict(re.findall(r"^([A-Z_]+) = ['\"]?(\w*)", text, re.MULTILINE))
        major, minor, patch, pre_release = (values[name] for name in _PARTS)
    except (OSError, KeyError) as error:
        raise RuntimeError(
            f"{folder} does not state its version: install megatron-core {OLDEST} or newer"
        ) from error
    return Version(f"{major}.{minor}.{patch}{pre_release}")


def has_training() -> bool:
    """Return whether Megatron-LM's own `megatron.training` can be imported, not our stand-in.

    Nothing is imported: features ask before a script has got so far.
    """
    spec = importlib.util.find_spec("megatron")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "training" / "arguments.py").is_file() for folder in folders or ())


def require() -> None:
    """Raise RuntimeError, saying what to do, unless megatron-core can be imported here."""
    found = version()
    if found < OLDEST:
        raise RuntimeError(
            f"megatron-core {found} in {location()} is too old: {OLDEST} or newer is needed, "
            f"pip install --upgrade 'megatron-core>={OLDEST}'"
        )
    if found > NEWEST_WITHOUT_TRITON and importlib.util.find_spec("triton") is None:
        user = _importer_of("triton")
        if user is not None:
            raise RuntimeError(
                f"megatron-core {found} in {location()} imports triton on every machine ({user}) "
                "and triton is not installed: pip install triton, or pip install "
                f"megatron-core=={NEWEST_WITHOUT_TRITON}"
            )


def config_fields() -> set[str]:
    """Return the names of all fields of Megatron's configs: model, optimizer, data parallelism."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    configs = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    return {field.name for config in configs for field in dataclasses.fields(config)}


def _importer_of(package: str) -> Path | None:
    """Follow the imports that `import megatron.core` makes to a file that needs the package."""
    root = location()
    assert root is not None
    todo, seen = [root / "__init__.py"], set()
    while todo:
        file = todo.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for source, names, plain in _IMPORT.findall(file.read_text(errors="replace")):
            module = source or plain
            if module.partition(".")[0] == package:
                return file.relative_to(root)
            todo += _files(root, file, module, names)
    return None


def _files(root: Path, file: Path, module: str, names: str) -> list[Path]:
    """Return the files that one import statement may execute; some may not exist."""
    if module.startswith("megatron.core"):
        parts = module.split(".")[2:]
        base = root
    elif module.startswith("."):
        up = len(module) - len(module.lstrip("."))
        base = file.parents[up - 1]
        parts = [part for part in module.split(".") if part]
    else:
        return []
    folders = [base.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    found = [folder / "__init__.py" for folder in folders]
    target = folders[-1]
    submodules = [target / name for name in re.findall(r"\w+", names)]
    found += [path.with_suffix(".py") for path in (target, *submodules)]
    return found + [path / "__init__.py" for path in submodules]
