"""Read the config.json of an HF model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.models.shape import RotaryShape, Scaling

LARGEST = 16 << 20
"""Bytes; a config.json of more is no config.json."""
LARGEST_NUMBER = 1e30
MANY = 10_000
"""Layers, heads or experts, which are walked through one by one; more is damage or ill will."""


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

    def integer(
        self, *names: str, default: int | None = None, least: int = 1, most: int = 1 << 31
    ) -> int:
        """Return the first of several names that is there, a whole number within bounds."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                is_whole = isinstance(value, int) and not isinstance(value, bool)
                if not is_whole or not least <= value <= most:
                    allowed = f"a whole number from {least} to {most}"
                    raise ConfigError(
                        f"{self.source}: {name} is {value!r:.40}: it must be {allowed}"
                    )
                return int(value)
        if default is None:
            raise ConfigError(f"{self.source}: {' or '.join(names)} is missing")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} is {value!r:.40}: it must be true or false")
        return value

    def values(self, name: str) -> list[Any]:
        """Return a list; nothing where it is missing."""
        found = self.get(name, [])
        if not isinstance(found, list):
            raise ConfigError(f"{self.source}: {name} is {found!r:.40}: it must be a list")
        return found

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

        kind = str(values.get("rope_type") or values.get("type") or "default")
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
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not -LARGEST_NUMBER < value < LARGEST_NUMBER:  # NaN is neither
        raise ConfigError(f"{source}: {name} is {value!r:.40}: it must be a number")
    return float(value)
