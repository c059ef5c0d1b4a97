"""The base of every options class."""

from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from mindspeed.config.annotations import (
    Alias,
    CommaSeparated,
    choices,
    element,
    in_words,
    split_commas,
    without_none,
)


class Options(BaseModel):
    """Named, typed, unchangeable values; the string under a field is its help text."""

    # strict: True is not 1 and "3" is not 3, so a typing slip in a file is never guessed away.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    @classmethod
    def accepted_names(cls) -> dict[str, str]:
        """Map every name that is accepted for a field, old names included, to the field."""
        names = {field: field for field in cls.model_fields}
        for field, info in cls.model_fields.items():
            names.update(dict.fromkeys(aliases(info), field))
        return names

    @model_validator(mode="before")
    @classmethod
    def _without_aliases(cls, values: Any) -> Any:
        names = cls.accepted_names()
        if not isinstance(values, dict) or len(names) == len(cls.model_fields):
            return values
        renamed: dict[Any, Any] = {}
        for name, value in values.items():
            field = names.get(name, name)
            if field in renamed:
                alias = next(each for each in values if names.get(each) == field != each)
                raise ValueError(f"{field} and its old name {alias} are both given: drop {alias}")
            renamed[field] = value
        return renamed

    @field_validator("*", mode="before")
    @classmethod
    def _as_declared(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        annotation, _ = without_none(field.annotation)
        if isinstance(value, str) and CommaSeparated in field.metadata:
            return split_commas(value, element(annotation))
        if isinstance(value, list) and get_origin(annotation) is tuple:
            return tuple(value)  # YAML and argparse have lists only; a frozen object holds tuples
        allowed = choices(annotation)
        if isinstance(value, bool) and allowed and not any(value is one for one in allowed):
            raise ValueError(f"give {in_words(annotation)}")  # pydantic takes True for Literal[1]
        return value


def aliases(info: FieldInfo) -> list[str]:
    """Return the old names of a field."""
    return [mark.name for mark in info.metadata if isinstance(mark, Alias)]
