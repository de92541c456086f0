"""Define what all sections of the config share: their base class and the types of common numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

_BEGINS_WITH_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{\w+\})(?:/|$)")


def _without_tilde(folder: str) -> str:
    """Replace a leading `~` or `~USER` by that user's home folder; raise ValueError for a leading variable."""
    if _BEGINS_WITH_VARIABLE.match(folder):  # a run would write below a folder of this very name
        raise ValueError(
            "expected a whole path, because a config replaces no variable (the shell does, in double quotes after "
            "--set)"
        )
    try:
        return str(Path(folder).expanduser()) if folder.startswith("~") else folder
    except RuntimeError:
        raise ValueError(
            f"{folder}: there is no such user, or this user has no home folder; write the whole path, or set HOME"
        ) from None


_MOST = 2**53  # Larger integers are not exact as floats, and products of them with a size do not fit into 64 bits.
_MOST_FLOAT = 1e30  # A larger one, or its square root times a count, is no float32.
_LEAST_FLOAT = 1e-30  # A smaller one, or its square, may be 0 in float32.
Positive = Annotated[int, Field(gt=0, le=_MOST)]
NonNegative = Annotated[int, Field(ge=0, le=_MOST)]
# Number of rows of a step, of features, or of entries of a table. No useful one is larger, and memory or lists of this
# length are made from it.
Size = Annotated[int, Field(gt=0, le=2**24)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]  # at most 30 years, which any timer of the system can wait
NonNegativeSeconds = Annotated[float, Field(ge=0, le=1e9)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
# The tilde is replaced here, once, so that all parts of the program that read the path mean the same folder.
LocalFolder = Annotated[str, AfterValidator(_without_tilde)]


def refuse_boolean(value: Any) -> Any:
    """Return `value`; raise ValueError if it is a boolean, because pydantic would take `true` for the number 1."""
    if isinstance(value, bool):
        raise ValueError(
            "a boolean is not a value of this key (in YAML yes, no, on and off are booleans unless they are in quotes)"
        )
    return value


class Section(BaseModel):
    """Base class of all sections of the config, a pydantic model whose values cannot be changed once it is created.

    Validation refuses unknown keys, and numbers that are infinite, NaN, or too large or too small for float32.
    """

    # A section is built at its first use, because those of a config are built as parts of `Config`.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_not_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean, alone or in a list, for a key that allows none; pydantic would take `true` for 1."""
        assert info.field_name is not None
        if _allows_boolean(cls.model_fields[info.field_name].annotation):
            return value
        elements = value if isinstance(value, (list, tuple)) else [value]
        for element in elements:
            refuse_boolean(element)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _floats_are_float32(cls, value: Any) -> Any:
        """Refuse a number that is too large for float32, or so small that float32 might round it to 0."""
        for number in _floats_in(value):
            if abs(number) > _MOST_FLOAT:
                raise ValueError(f"a number must be between -{_MOST_FLOAT:g} and {_MOST_FLOAT:g}")
            if 0.0 < abs(number) < _LEAST_FLOAT:
                raise ValueError(f"a number other than 0 must be at least {_LEAST_FLOAT:g} in size")
        return value


def _floats_in(value: object) -> Iterator[float]:
    """Yield every float in a config value: the value itself, or the elements of a mapping or a list."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for element in value.values():
            yield from _floats_in(element)
    elif isinstance(value, tuple):
        for element in value:
            yield from _floats_in(element)


def _allows_boolean(annotation: Any) -> bool:
    """Return whether a type allows a boolean: bool, Any, or a type that contains one of them, such as bool | None."""
    return annotation in (bool, Any) or any(_allows_boolean(part) for part in get_args(annotation))
