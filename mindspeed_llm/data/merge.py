"""Several `.bin`/`.idx` pairs joined into one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import CHUNK, IndexedTokens, TokenWriter
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.workspace import Workspace


def merge_groups(options: PreprocessOptions) -> dict[str, int]:
    """Join, for every key, the pairs whose names hold it; return how many went into which."""
    folder = Path(options.input or "")
    if not folder.is_dir():
        raise ConfigError(f"--input {folder}: --merge-group-keys needs a folder of .bin/.idx pairs")
    if not options.output_prefix:
        raise ConfigError("--output-prefix is missing: give a path and how the names begin")
    names = sorted(path.with_suffix("") for path in folder.glob("*.idx"))
    groups = {key: [n for n in names if key in n.name] for key in options.merge_group_keys}
    for key, members in groups.items():
        if not members:
            found = ", ".join(name.name for name in names[:5]) or "none"
            raise ConfigError(
                f"--merge-group-keys {key}: no pair in {folder} has that in its name; "
                f"there are {found}"
            )
    return {f"{options.output_prefix}_{key}": _merge(options, key, g) for key, g in groups.items()}


def _merge(options: PreprocessOptions, key: str, members: list[Path]) -> int:
    parts = [IndexedTokens(str(member)) for member in members]
    kinds = sorted({str(part.dtype) for part in parts})
    if len(kinds) > 1:
        raise ConfigError(f"--merge-group-keys {key}: the pairs hold {' and '.join(kinds)} tokens")
    final = f"{options.output_prefix}_{key}"
    workspace = Workspace(final, fingerprint="merge")
    try:
        writer = TokenWriter(workspace.folder, "tokens", parts[0].dtype)
        for part in parts:
            _append(writer, part)
        writer.build_index(workspace.folder / "tokens.idx")
        files = {"tokens.bin": Path(f"{final}.bin"), "tokens.idx": Path(f"{final}.idx")}
        workspace.publish(files, {})
    finally:
        workspace.release()
    return len(parts)


def _append(writer: TokenWriter, part: IndexedTokens) -> None:
    """Copy a pair in pieces; documents keep their borders."""
    documents = part.documents
    for first in range(0, len(documents) - 1, CHUNK):
        borders = documents[first : first + CHUNK + 1]
        start, end = int(borders[0]), int(borders[-1])
        tokens = [part[place] for place in range(start, end)]
        joined = np.concatenate([*tokens, np.zeros(0, part.dtype)], dtype=part.dtype)
        writer.append(joined, part.lengths[start:end], borders[1:] - start)
