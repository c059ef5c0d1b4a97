"""Read the config.json of an HF model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.models.shape import RotaryShape, Scaling

LARGEST = 16 << 20
"""Bytes; a config.json of more is no config.json."""


class HfConfig:
    """The values of a config.json; a missing or wrong one is told with the file's name."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    @classmethod
    def read(cls, folder: Path) -> "HfConfig":
        """Read folder/config.json."""
        path = folder / "config.json"
        try:
            if path.stat().st_size > LARGEST:
                raise ConfigError(f"{path}: is larger than {LARGEST >> 20} MiB: not a config.json")
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: holds a {type(values).__name__}, not names and values")
        return cls(values, str(path))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value that may be missing; null counts as missing."""
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of several names that is there, a whole number of at least 1."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ConfigError(f"{self.source}: {name} is {value!r}: it must be 1 or more")
                return value
        if default is None:
            raise ConfigError(f"{self.source}: {' or '.join(names)} is missing")
        return default

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        return _number(self.source, name, self.get(name, default))

    def rotary(self) -> RotaryShape:
        """Return the rotary embedding, from rope_parameters or from rope_theta and rope_scaling."""
        values = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{self.source}: the rotary parameters are {values!r}, not an object")

        def number(name: str, default: float) -> float:
            found = values.get(name)
            return _number(self.source, name, default if found is None else found)

        kind = values.get("rope_type") or values.get("type") or "default"
        kinds: dict[str, Scaling] = {"default": "none", "linear": "linear"}
        kinds |= {"llama3": "llama3", "yarn": "yarn"}
        if kind not in kinds:
            raise ConfigError(
                f"{self.source}: rotary scaling {kind!r} is not known: "
                f"{', '.join(kinds)} are (dynamic scaling counts only beyond the trained length: "
                "set rope_type to default to train within it)"
            )
        length = self.integer("max_position_embeddings", default=8192)
        return RotaryShape(
            base=number("rope_theta", self.number("rope_theta", 10000.0)),
            scaling=kinds[kind],
            factor=number("factor", 1.0),
            original_length=int(number("original_max_position_embeddings", length)),
            low_frequency_factor=number("low_freq_factor", 1.0),
            high_frequency_factor=number("high_freq_factor", 4.0),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            mscale=number("mscale", 1.0),
            mscale_all_dim=number("mscale_all_dim", 0.0),
        )


def _number(source: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ConfigError(f"{source}: {name} is {value!r}: it must be a number")
    return float(value)
