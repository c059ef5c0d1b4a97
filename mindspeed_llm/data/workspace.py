"""The folder beside the output in which a run grows, so that nothing unfinished bears a final name.

A killed run leaves the folder; the same command takes up from the last state saved in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data import durable


class Workspace:
    """`{prefix}.partial/`, held by one run at a time."""

    def __init__(self, prefix: str, fingerprint: str) -> None:
        self.prefix = Path(prefix)
        self.folder = Path(f"{prefix}.partial")
        self._fingerprint = fingerprint
        self._make_folder()
        self._lock = self._take_lock()
        self.state = self._read_state()
        """What the run that was here before had saved; empty if it was another run or none."""
        if not self.state:
            self._clear()

    @property
    def was_publishing(self) -> bool:
        """Whether all was done but the giving of final names."""
        return "publish" in self.state

    def _make_folder(self) -> None:
        if not self.prefix.name or self.prefix.is_dir():
            raise ConfigError(
                f"--output-prefix {self.prefix} is a folder: add how the names of the files begin, "
                f"such as {self.prefix / 'data'}"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--output-prefix {self.prefix}: {self.folder} cannot be made: {error.strerror}"
            ) from None

    def _take_lock(self) -> int:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"--output-prefix {self.prefix}: another run is writing there now"
            ) from None
        return lock

    def _read_state(self) -> dict[str, Any]:
        try:
            state = parse_json((self.folder / "state.json").read_bytes())
            is_ours = state["fingerprint"] == self._fingerprint
            return state["state"] if is_ours and self._has_files(state["state"]) else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _has_files(self, state: dict[str, Any]) -> bool:
        """Tell whether what was written up to the state is still there."""
        expected = state.get("sizes", {}).items()
        return all((self.folder / name).stat().st_size >= size for name, size in expected)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def save(self, state: Mapping[str, Any]) -> None:
        """Remember how far the run is."""
        content = {"fingerprint": self._fingerprint, "state": state}
        durable.write(self.folder / "state.json", json.dumps(content).encode())

    def publish(self, files: Mapping[str, Path], state: Mapping[str, Any]) -> None:
        """Give finished files their final names, and leave.

        `files` maps names in the folder to final paths, each index behind its data. A run that
        is killed in the middle has the rest done by the next one, so the plan is saved first.
        """
        for name in files:
            durable.sync(self.folder / name)
        self.state = {**state, "publish": {name: str(final) for name, final in files.items()}}
        self.save(self.state)
        # An index makes data readable, so an older one goes before its data is replaced.
        for final in files.values():
            if final.suffix == ".idx":
                final.unlink(missing_ok=True)
        durable.sync(self.prefix.parent)
        self.publish_again()

    def publish_again(self) -> None:
        """Move whatever has not got its final name yet, and leave."""
        for name, final in self.state["publish"].items():
            if (self.folder / name).exists():
                os.replace(self.folder / name, final)
        durable.sync(self.prefix.parent)
        shutil.rmtree(self.folder)
        self.release()

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def release(self) -> None:
        """Let another run have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
