"""Name keys by their dotted paths, such as "train.micro_batch": those of a config's classes, and those of a tree."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Tree = dict[str, Any]
_ELEMENTS: dict[Any, str] = {tuple: "[]", dict: ".*"}  # how a key names any element of a list or a mapping


def fields(root: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the field of every key below a section, by its dotted key; a section comes before its keys.

    In such a key, [] stands for the elements of a list of sections, as in "data.phases[].corpus", and * for those of a
    mapping, as in "tasks.*.seeds".
    """
    found: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        key = field.alias or name
        found[key] = field
        section = section_class(field.annotation)
        if section is not None:
            place = key + _ELEMENTS.get(get_origin(field.annotation), "")
            found |= {f"{place}.{inner_key}": inner_field for inner_key, inner_field in fields(section).items()}
    return found


def section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a field's type, such as SECTION in `tuple[SECTION, ...]`; None for a plain type."""
    for part in (annotation, *get_args(annotation)):
        kind = get_args(part)[0] if get_origin(part) is Annotated else part
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def flattened(tree: Tree, prefix: str = "") -> Tree:
    """Flatten nested dictionaries into one with dotted keys; an empty inner dictionary stays a value."""
    flat: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
