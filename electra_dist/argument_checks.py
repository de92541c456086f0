"""Check the arguments that users of the library pass, against the annotations of the functions.

Guarantee: an argument of another type than its annotation, or outside of the range that it states, is a UserError of
one line (and, as usual in Python, a ValueError) with the function, the argument, its value and what is accepted.
Numbers of NumPy become Python's; nothing else is converted. True and False do not count as numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import re
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, InstanceOf, ValidationError, create_model
from pydantic_core import ErrorDetails

from electra_dist.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST_VALUE = 60  # characters of a value in a message
_MESSAGE_BEGINS = re.compile("^(Input should be|Value error,) ")  # of pydantic's messages


def _valid_unicode(text: str) -> str:
    """Return `text`; raise ValueError if it has half of a surrogate pair, which tokenizers cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("Unicode text, without half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_valid_unicode)]


class WrongArgument(UserError, ValueError):
    """Error for a wrong argument of a library function; its message names the argument and what is accepted."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function or method so that it raises WrongArgument for an argument that its annotations do not allow."""
    signature = inspect.signature(function)

    @functools.cache
    def arguments_model() -> type[BaseModel]:
        hints = get_type_hints(function, include_extras=True)
        parameters = [name for name in signature.parameters if name in hints]
        fields: dict[str, Any] = {name: (_validated_type(hints[name]), None) for name in parameters}
        return create_model(
            function.__name__, __config__=ConfigDict(strict=True, arbitrary_types_allowed=True), **fields
        )

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python names the argument that is missing or one too many
        for name, value in bound.arguments.items():
            bound.arguments[name] = _without_numpy(value)
        try:
            arguments_model().model_validate(bound.arguments)
        except ValidationError as error:
            raise WrongArgument(_explain(function.__name__, error.errors(include_url=False))) from None
        return function(*bound.args, **bound.kwargs)

    return call


def _validated_type(hint: Any) -> Any:
    """Return the type that pydantic checks for an annotation; of a pydantic model or a dataclass, only the class."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_validated_type(part) for part in get_args(hint))]  # noqa: UP007
    is_model = isinstance(hint, type) and issubclass(hint, BaseModel)
    return InstanceOf[hint] if is_model or dataclasses.is_dataclass(hint) else hint  # type: ignore[misc]


def _without_numpy(value: Any) -> Any:
    """Convert a number of NumPy to Python's int or float; return any other value unchanged."""
    if isinstance(value, numbers.Integral) and not isinstance(value, int):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):
        return float(value)
    return value


def _explain(function: str, faults: list[ErrorDetails]) -> str:
    """Return the message about the first wrong argument of a call; `faults` has an entry for each type of a union."""
    first = faults[0]
    argument, *places = first["loc"]
    if first["type"] == "sequence_str":
        accepted = [f"a list of texts, such as [{_shown(first['input'])}]"]
    else:
        messages = [fault["msg"] for fault in faults if fault["loc"][0] == argument]
        accepted = [
            _MESSAGE_BEGINS.sub("", message).replace("an instance of Sequence", "a list") for message in messages
        ]
    elements = "".join(f"[{place}]" for place in places if isinstance(place, int))
    return (
        f"{function}: the argument {argument}{elements} is {_shown(first['input'])}, but must be "
        f"{' or '.join(dict.fromkeys(accepted))}; see help(electra_dist.{function})"
    )


def _shown(value: object) -> str:
    if value is not None and not isinstance(value, (str, bytes, int, float)):
        return f"of type {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
