"""Write the reference of all config keys, docs/config.md, from the descriptions of the config's fields.

Run `python -m electra_dist.config.reference > docs/config.md` or `make docs/config.md` after a change of the config. A
test fails if the page is out of date.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from electra_dist.config import Config
from electra_dist.config.keys import fields, section_class
from electra_dist.config.schedule import Schedule

_INTRODUCTION = """# Configuration

A run is described by one YAML file. `extends: OTHER.yaml` starts from another file, which may extend a further one,
and `--set section.key=value` overrides a key. A file `configs/NAME` that does not exist is taken from those that come
with the package. An unknown key and a key that is set twice in a file are errors. `electra-dist config FILE
--describe` shows these descriptions with the values of a file and where each comes from. Of several choices the
default is bold; a key that may be `null` is so by default, where no other default is given. This page is generated
from `electra_dist/config/sections/`; do not edit it.
"""
_SCHEDULES = """A key of the type schedule takes a number, or a mapping of the keys of this table, for example
`{from: 4, to: 1, shape: linear}`. [objectives.md](objectives.md#schedules) has recipes. A schedule that is given as a
whole on the command line, or in a file that extends another, replaces the one there.
"""


def reference() -> str:
    """Return the text of docs/config.md: for each section, a table of keys with type, default and description."""
    schedules = _table("Schedules", [_row(key, field) for key, field in fields(Schedule).items()], _SCHEDULES)
    return "\n".join([_INTRODUCTION, *_tables(Config, "The run"), schedules])


def _tables(root: type[BaseModel], title: str) -> list[str]:
    """Return the Markdown tables of a config class: one of its own keys, with `title`, and one of each section."""
    rows: dict[str, list[str]] = {"": []}  # by section of the root
    schedules = set()
    for key, field in fields(root).items():
        section, _, _ = key.rpartition(".")
        if section in schedules:
            continue
        inner = section_class(field.annotation)
        if inner is None or field.annotation is not inner:  # a section that every config has is no key of its own
            rows.setdefault(section.partition(".")[0], []).append(_row(key, field))
        if inner is not None and issubclass(inner, Schedule):
            schedules.add(key)
    return [_table(f"`{section}`" if section else title, lines) for section, lines in rows.items()]


def _row(key: str, field: FieldInfo) -> str:
    cells = [f"`{key}`<br>{_type_and_default(field)}", field.description or ""]
    escaped = [cell.replace("|", "\\|") for cell in cells]  # a bare | would end the cell
    return "| " + " | ".join(escaped) + " |"


def _table(title: str, rows: list[str], introduction: str = "") -> str:
    lines = [f"## {title}", "", introduction] if introduction else [f"## {title}", ""]
    lines += ["| key<br>type, default | description |", "| --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def _type_and_default(field: FieldInfo) -> str:
    """Return a key's type and default as Markdown, such as "`int`, `42`"; in a list of choices the default is bold."""
    kind = _type_name(field.annotation)
    default = _default(field)
    if get_origin(field.annotation) is Literal and default in kind:
        return kind.replace(default, f"**{default}**", 1)
    return kind if field.default is None else f"{kind}, {default}"


def _type_name(annotation: Any) -> str:
    """Return a type as people write it: `int`, `float or null`, `list of str`, or the choices of a Literal."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if annotation is NoneType:
        return "`null`"
    if isinstance(annotation, TypeVar):
        return "as the key"
    if issubclass(annotation, Schedule):
        return "[schedule](#schedules)"
    if issubclass(annotation, BaseModel):
        return "section"
    return f"`{annotation.__name__}`"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, bool):
        return "`true`" if field.default else "`false`"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{field.default}`"


if __name__ == "__main__":
    print(reference(), end="")
