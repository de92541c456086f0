"""The documentation quotes what is there: exit codes, messages, config keys and files."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from electra_launcher.cli.main import app
from pydantic import BaseModel

from electra_dist import errors
from electra_dist.config import Config
from electra_dist.finetune.finetune_config import FinetuneConfig, check_overrides

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
SECTIONS = {name for name, field in Config.model_fields.items() if isinstance(field.annotation, type)}
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
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


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `electra-dist` command in the code blocks and the inline code of a page."""
    fences = re.findall(r"^```(\w*).*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fences if language in ("", "bash")]
    inline = re.findall(r"`(electra-dist [^`]+)`", text)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines() + [line.replace("\n", " ") for line in inline]:
        if line.strip().startswith("electra-dist "):
            words = shlex.split(line, comments=True)
            yield words[1 : next((i for i, word in enumerate(words) if word in ("|", ">", "&&")), None)]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that `words` name, as its parser knows it, and the words after its name."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
        context = command.make_context("electra-dist", [], resilient_parsing=True)
        _, command, words = command.resolve_command(context, words)
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_exists_with_its_options(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        command, rest = command_of(words)
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.split("=")[0] for word in rest if word.startswith("--")}
        assert options <= known | {"--help"}, " ".join(words)


def test_every_value_that_the_page_on_fine_tuning_sets_is_accepted() -> None:
    text = (DOCS / "finetune.md").read_text()
    keys = "|".join(FinetuneConfig.model_fields)
    settings = re.findall(rf"(?:'(?=\w)|--set\s+)((?:{keys})=(?:\{{[^}}]*\}}|[^\s'`]+))", text)
    assert len(settings) >= 8
    for setting in settings:
        check_overrides([setting])


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as the documentation's builder and GitHub name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else page.parent / path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
