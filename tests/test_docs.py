"""The documentation quotes what is there: exit codes, messages, config keys and files."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from electra_dist import errors
from electra_dist.config import Config

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
SECTIONS = {name for name, field in Config.model_fields.items() if isinstance(field.annotation, type)}
HOLE = "\0"  # stands for a value in an f-string


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of the tables of a page, without headers."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


@functools.cache
def messages() -> str:
    """Return all texts in the code, one per line; values in them are holes."""
    texts = []
    for package in ("electra_dist", "launcher"):
        for file in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values]
                    texts.append("".join(parts))
        texts += [file.read_text() for file in (REPOSITORY / package).rglob("*.sh")]
    return "\n".join(texts)


def test_every_exit_code_has_its_row_with_what_to_do() -> None:
    codes = {str(value) for name, value in vars(errors).items() if name.startswith("EXIT_")}
    rows = [row for row in table_rows((DOCS / "troubleshooting.md").read_text()) if row[0].isdigit()]
    assert sorted(row[0] for row in rows) == sorted(codes)
    assert all(len(row) == 4 and row[3] for row in rows)


def test_every_message_of_the_troubleshooting_page_is_one_that_the_code_writes() -> None:
    """A first cell that begins with a backtick quotes a message, with `...` between its parts around a value."""
    rows = table_rows((DOCS / "troubleshooting.md").read_text())
    quotes = [fragment for row in rows if row[0].startswith("`") for fragment in re.findall(r"`([^`]+)`", row[0])]
    assert len(quotes) > 30
    assert [quote for quote in quotes if quote not in messages()] == []


def config_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Return the dotted keys of a section of the config, sections within it included."""
    keys = set()
    for name, field in model.model_fields.items():
        keys.add(prefix + name)
        annotation = field.annotation
        kinds = [annotation, *getattr(annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys |= config_keys(kind, f"{prefix}{name}.")
    return keys


@pytest.mark.parametrize("page", ["troubleshooting.md", "cluster.md", "recipes.md", "objectives.md"])
def test_every_config_key_that_a_page_names_exists(page: str) -> None:
    sections = "|".join(sorted(SECTIONS))
    named = re.findall(rf"`(?:--set )?'?((?:{sections})\.[a-z_0-9.]+[a-z_0-9])\b", (DOCS / page).read_text())
    assert named
    files = {"checkpoint.json", "data.json"}
    assert sorted(set(named) - config_keys(Config) - files) == []


@pytest.mark.parametrize("page", ["troubleshooting.md", "cluster.md", "recipes.md"])
def test_every_file_of_the_repository_that_a_page_names_exists(page: str) -> None:
    text = (DOCS / page).read_text()
    named = set(re.findall(r"\b((?:configs|docker|launcher|benchmarks|tests)/[\w./-]+\.(?:yaml|py|sh|md))\b", text))
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


def test_every_test_that_a_guarantee_names_exists() -> None:
    text = (DOCS / "guarantees.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", text)
    guarantees = re.findall(r"^## \d+\. ", text, flags=re.MULTILINE)
    assert len(guarantees) >= 20 and text.count("Held by:") == len(guarantees)
    for file, test in named:
        assert f"def {test}(" in (REPOSITORY / file).read_text(), f"{file}::{test}"
    assert len(named) >= len(guarantees)
