"""The base of every options class, and its field annotations in words and as Python types."""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from typing_extensions import Self

from mindspeed.config.suggest import one_of


class CommaSeparated:
    """Mark a tuple field, as in Annotated[tuple[int, ...], CommaSeparated], that is also "0,5"."""


@dataclass(frozen=True)
class Alias:
    """Mark a field, as in Annotated[bool, Alias("old_name")], that is accepted by an old name."""

    name: str


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Split `X | None` into X, without its bounds, and True; other types into X and False."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return _without_bounds(annotation), False
    members = [member for member in get_args(annotation) if member is not type(None)]
    optional = len(members) < len(get_args(annotation))
    return (_without_bounds(members[0]) if len(members) == 1 else annotation), optional


def _without_bounds(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def element(annotation: Any) -> Any:
    """Return the type of the elements of a list or homogeneous tuple, None for other types."""
    if get_origin(annotation) not in (list, tuple):
        return None
    return get_args(annotation)[0]


def choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values that a Literal allows, nothing for other types."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def split_commas(text: str, item: type) -> tuple[Any, ...]:
    """Split "0,5" into elements of the given type."""
    try:
        return tuple(item(word) for word in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ValueError(f"give {in_words(item)}, or several with commas between") from None


def in_words(annotation: Any) -> str:
    """Return the values that an annotation allows, in words."""
    inner, optional = without_none(annotation)
    if values := choices(inner):
        words = one_of(values)
    elif (item := element(inner)) is not None:
        words = f"a list, each element {in_words(item)}"
    else:
        words = WORDS.get(inner, str(inner))
    return f"{words}, or nothing (null)" if optional else words


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

    @classmethod
    def merge(cls, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with those of its options that are given, by the names they are given."""
        names = cls.accepted_names()
        ours = {name: value for name, value in given.items() if name in names}
        given_fields = {names[name] for name in ours}
        return {n: v for n, v in values.items() if names.get(n, n) not in given_fields} | ours

    _old_names: dict[str, str] = PrivateAttr(default_factory=dict)
    """The fields that were given by an old name, and that name."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and dict(self) == dict(other)  # type: ignore[call-overload]

    def name_given(self, field: str) -> str:
        """Return the name that a field was given by, for errors: an old name or its own."""
        return self._old_names.get(field, field)

    def as_given(self) -> dict[str, Any]:
        """Return the values that were set, by the names that they were given."""
        values = self.model_dump(exclude_unset=True)
        return {self.name_given(field): value for field, value in values.items()}

    @model_validator(mode="wrap")
    @classmethod
    def _by_old_names(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        names = cls.accepted_names()
        if not isinstance(values, dict) or len(names) == len(cls.model_fields):
            return validate(values)
        old_names = {names[name]: name for name in values if names.get(name, name) != name}
        for field, alias in old_names.items():
            if field in values:
                raise ValueError(f"{field} and its old name {alias} are both given: drop {alias}")
        options = validate({names.get(name, name): value for name, value in values.items()})
        options._old_names = old_names
        return options

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


class SectionOptions(Options):
    """Options of a section of a file, in which an entry that is left empty is the default."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {n: v for n, v in values.items() if v is not None or cls._allows_null(n)}

    @classmethod
    def _allows_null(cls, name: str) -> bool:
        info = cls.model_fields.get(name)
        return info is None or without_none(info.annotation)[1]


def aliases(info: FieldInfo) -> list[str]:
    """Return the old names of a field."""
    return [mark.name for mark in info.metadata if isinstance(mark, Alias)]
