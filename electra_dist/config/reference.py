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
from electra_dist.config.schedule import Schedule

_INTRODUCTION = """# Configuration

A run is described by one YAML file. `extends: OTHER.yaml` starts from another file, which may extend a further one,
and `--set section.key=value` overrides a key. A file `configs/NAME` that does not exist is taken from those that come
with the package. An unknown key is an error that names the nearest valid one; a key that is set twice in a file is an
error, too. `electra-dist config FILE --describe` shows the same descriptions with the values of a file and where each
value comes from. This page is generated from `electra_dist/config/sections/`; do not edit it.
"""
_SCHEDULES = """A key of the type schedule takes a number, or a mapping of the keys of this table, for example
`{from: 4, to: 1, shape: linear}`. [objectives.md](objectives.md#schedules) has recipes. A schedule that is given as a
whole on the command line, or in a file that extends another, replaces the one there.
"""


def reference() -> str:
    """Return the text of docs/config.md: one Markdown table for each section of the config, in the order of fields."""
    parts = [_INTRODUCTION, _table("The run", _plain_fields(Config), prefix="")]
    for name, field in Config.model_fields.items():
        section = _section_of(field)
        if section is not None:
            parts.append(section_tables(name, section))
    parts.append(_table("Schedules", dict(Schedule.model_fields), prefix="", introduction=_SCHEDULES))
    return "\n".join(parts)


def section_tables(path: str, section: type[BaseModel]) -> str:
    """Return the Markdown tables of a section and of the sections in it; `path` is dotted, as in `model.generator`."""
    parts = [_table(f"`{path}`", _plain_fields(section), prefix=f"{path}.")]
    for name, field in section.model_fields.items():
        inner = _section_of(field) or _optional_section_of(field)
        if inner is not None:
            parts.append(section_tables(f"{path}.{name}", inner))
        element = _element_section_of(field)
        if element is not None:
            parts.append(section_tables(f"{path}.{name}[]", element))
    return "\n".join(parts)


def plain_table(title: str, section: type[BaseModel], prefix: str = "") -> str:
    """Return the Markdown table of a section's plain values; `prefix` begins every key, for example `train.`."""
    return _table(title, _plain_fields(section), prefix)


def _plain_fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    return {name: field for name, field in section.model_fields.items() if _section_of(field) is None}


def _table(title: str, fields: dict[str, FieldInfo], prefix: str, introduction: str = "") -> str:
    lines = [f"## {title}", "", introduction] if introduction else [f"## {title}", ""]
    lines += ["| key | type | default | description |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        cells = [
            f"`{prefix}{field.alias or name}`",
            _type_name(field.annotation),
            _default(field),
            field.description or "",
        ]
        escaped = [cell.replace("|", "\\|") for cell in cells]  # a bare | would end the cell
        lines.append("| " + " | ".join(escaped) + " |")
    return "\n".join(lines) + "\n"


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a field that is a section of the config; None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _optional_section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a section that a config may leave out (`SECTION or null`); None for any other field."""
    if get_origin(field.annotation) not in (Union, UnionType):
        return None
    choices = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    if len(choices) == 1 and isinstance(choices[0], type) and issubclass(choices[0], BaseModel):
        return choices[0]
    return None


def _element_section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class SECTION of a field that lists sections (`tuple[SECTION, ...]`); None for any other field."""
    if get_origin(field.annotation) is not tuple:
        return None
    element = get_args(field.annotation)[0]
    return element if isinstance(element, type) and issubclass(element, BaseModel) else None


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
    if field.default is None:
        return "`null`"
    if isinstance(field.default, bool):
        return "`true`" if field.default else "`false`"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{field.default}`"


if __name__ == "__main__":
    print(reference(), end="")
