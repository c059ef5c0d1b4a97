"""Read the config.json of an HF model."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError, kind_of
from mindspeed_llm.models.config_keys import HARMLESS, ROTARY, ROTARY_NEUTRAL, refuse_unread
from mindspeed_llm.models.shape import RotaryShape, Scaling

LARGEST = 16 << 20
"""Bytes; a config.json of more is no config.json."""
LARGEST_NUMBER = 1e30
MANY = 10_000
"""Layers, heads or experts, which are walked through one by one; more is damage or ill will."""


class HfConfig:
    """The values of a config.json, which remembers which of them were read.

    A missing or wrong value is reported with the file's name.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._read: set[str] = set()
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
            raise ConfigError(f"{path}: holds {kind_of(values)}, not names and values")
        return cls(values, str(path))

    def of_type(self, model_type: str, defaults: Mapping[str, Any]) -> "HfConfig":
        """Return the config with its type, and with values for keys that the file lacks."""
        return HfConfig({**defaults, **self._values, "model_type": model_type}, self.source)

    def refuse_unread(self, family: str, ignored: Collection[str] = ()) -> None:
        """Raise if a key that was not read, and is not to be ignored, can change the model."""
        refuse_unread(self.source, family, self._unread(), HARMLESS.union(ignored))

    def _unread(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in self._values.items() if name not in self._read]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value that may be missing; null counts as missing."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def integer(
        self, *names: str, default: int | None = None, least: int = 1, most: int = 1 << 31
    ) -> int:
        """Return the first of several names that is there, a whole number within bounds."""
        for name in names:
            value = self.get(name)
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

    def positive(self, name: str, default: float) -> float:
        """Return a number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise ConfigError(f"{self.source}: {name} is {value:g}: it must be above 0")
        return value

    def rotary(self) -> RotaryShape:
        """Return the rotary embedding, from rope_parameters or from rope_theta and rope_scaling."""
        rope = self._rotary_values()
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        kinds: dict[str, Scaling] = {"default": "none", "linear": "linear"}
        kinds |= {"llama3": "llama3", "yarn": "yarn"}
        if kind not in kinds:
            raise ConfigError(
                f"{self.source}: rotary scaling {kind!r} is not known: "
                f"{', '.join(kinds)} are (dynamic scaling counts only beyond the trained length: "
                "set rope_type to default to train within it)"
            )
        if kind != "default" and rope.get("factor") is None:
            raise ConfigError(f"{rope.source}: factor is missing, which {kind} scaling needs")
        length = self.integer("max_position_embeddings", default=2048)
        shape = RotaryShape(
            base=rope.positive("rope_theta", self.positive("rope_theta", 10000.0)),
            scaling=kinds[kind],
            factor=rope.positive("factor", 1.0),
            original_length=int(
                # Outside the rotary parameters it takes precedence, as in transformers.
                self.number(
                    "original_max_position_embeddings",
                    rope.number("original_max_position_embeddings", length),
                )
            ),
            low_frequency_factor=rope.number("low_freq_factor", 1.0),
            high_frequency_factor=rope.number("high_freq_factor", 4.0),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.number("mscale", 1.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        )
        _check_temperature(rope, shape)
        refuse_unread(rope.source, f"{kind} rope", rope._unread(), ROTARY, ROTARY_NEUTRAL)
        return shape

    def _rotary_values(self) -> "HfConfig":
        given = {name: self.get(name) for name in ("rope_scaling", "rope_parameters")}
        given = {name: values for name, values in given.items() if values}
        for name, values in given.items():
            if not isinstance(values, dict):
                raise ConfigError(
                    f"{self.source}: the rotary parameters {name} are {values!r:.40}, not an object"
                )
        if len(given) > 1 and given["rope_scaling"] != given["rope_parameters"]:
            raise ConfigError(
                f"{self.source}: rope_scaling and rope_parameters differ: keep one of them"
            )
        name, values = next(iter(given.items()), ("rope_parameters", {}))
        return HfConfig(values, f"{self.source}: {name}")


def _check_temperature(rope: HfConfig, shape: RotaryShape) -> None:
    """Raise where transformers would scale cos and sin of yarn by another factor than we do."""
    given = rope.get("attention_factor")
    if shape.scaling != "yarn":
        return
    has_both = rope.get("mscale") and shape.mscale_all_dim
    if not has_both and (shape.mscale != 1.0 or shape.mscale_all_dim):
        raise ConfigError(f"{rope.source}: give mscale and mscale_all_dim, or neither")

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(max(shape.factor, 1.0)) + 1.0

    own = temperature(shape.mscale) / temperature(shape.mscale_all_dim)
    if given is not None and not math.isclose(
        own, _number(rope.source, "attention_factor", given), rel_tol=1e-6
    ):
        raise ConfigError(
            f"{rope.source}: attention_factor is {given}: only {own:.6g}, which the factor of "
            "yarn makes it, is supported"
        )


def _number(source: str, name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not -LARGEST_NUMBER < value < LARGEST_NUMBER:  # NaN is neither
        raise ConfigError(f"{source}: {name} is {value!r:.40}: it must be a number")
    return float(value)
