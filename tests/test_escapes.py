"""Text of others on a terminal, in Markdown and in HTML: judged by Unicode's tables and by parsers of others."""

from __future__ import annotations

import ast
import sys
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from electra_dist.escapes import html_text, markdown_code, markdown_text, printable

ROOT = Path(__file__).parents[1]
# What a terminal or a page must never get: controls, formats (marks of direction, characters of no width), halves of
# surrogate pairs, separators of lines and paragraphs, and spaces that are not the usual one.
HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}
FILLERS = "\u034f\u115f\u1160\u3164\uffa0\ufe0f\U000e0101"  # letters and marks that show nothing
HOSTILE = (
    "a | b",
    "a\n\n# heading",
    "a\r\n| x | y |",
    "[click](javascript:alert(1))",
    "![x](data:image/svg+xml;base64,AAAA)",
    "<javascript:alert(1)>",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt; &#60;b> &copy;",
    "`code` ``more``",
    "`",
    "\\| \\` \\[x](y)",
    "**bold** _it_ ~~gone~~ $x$",
    "[ref]: http://example.org",
    "# heading",
    "- item",
    "1. item",
    "---",
    "\u202egpj.exe\u2066",
    "\x1b]8;;http://example.org\x07here\x1b]8;;\x07",
)


def test_every_character_that_shows_nothing_appears_as_an_escape() -> None:
    hidden = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in HIDDEN_CATEGORIES]
    for char in (*hidden, *FILLERS):
        if char != " ":
            shown = printable(f"a{char}b")
            assert shown.isascii() and shown.startswith("a\\") and shown.endswith("b"), hex(ord(char))
    assert printable("\x1b[31m\u202e\n\udcff") == "\\x1b[31m\\u202e\\n\\udcff"
    assert printable("Wörter, 言葉, كلمات {}[]\\n") == "Wörter, 言葉, كلمات {}[]\\n"


def inline_tokens(tokens: list[Token]) -> list[Token]:
    """Return the tokens within the lines of a parsed page."""
    return [child for token in tokens if token.type == "inline" for child in token.children or []]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_is_one_plain_cell_of_a_markdown_table_and_one_plain_heading(text: str) -> None:
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    page = f"# {markdown_text(text)}\n\n| a | b | c |\n| --- | --- | --- |\n| x | {markdown_text(text)} | y |\n\nend\n"

    tokens = parser.parse(page)
    assert [token.type for token in tokens].count("td_open") == 3
    assert {token.type for token in inline_tokens(tokens)} <= {"text", "text_special"}
    lines = ["".join(child.content for child in token.children or []) for token in tokens if token.type == "inline"]
    assert lines == [printable(text), "a", "b", "c", "x", printable(text), "y", "end"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_begins_a_line_of_markdown_as_plain_text(text: str) -> None:
    tokens = MarkdownIt("commonmark").parse(f"{markdown_text(text)}\n")
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert "".join(token.content for token in inline_tokens(tokens)) == printable(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_code_span_in_a_cell_shows_the_text_as_it_is(text: str) -> None:
    page = f"| a | b |\n| --- | --- |\n| x | {markdown_code(text)} |\n"
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    [code] = [token for token in inline_tokens(tokens) if token.type not in ("text", "text_special")]
    assert (code.type, code.content) == ("code_inline", printable(text))


@pytest.mark.parametrize("text", [*HOSTILE, '" onload="x', "' style='x"])
def test_a_text_is_only_text_of_an_html_element_and_of_an_attribute(text: str) -> None:
    found: list[object] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, attrs))

        def handle_data(self, data: str) -> None:
            found.append(data)

    reader = Reader()
    reader.feed(f'<p title="{html_text(text)}">{html_text(text)}</p>')
    reader.close()
    assert found == [("p", [("title", printable(text))]), printable(text)]


# Programs whose output is their own (numbers, reference pages, batch scripts), or that escape in another way (JSON,
# YAML, each line of a plan, texts for a terminal only).
OWN_OUTPUT = (
    "electra_dist/config/reference.py",
    "electra_dist/corpus/prepare/prepare_config.py",
    "electra_dist/planning/plan_page.py",
    "launcher/electra_launcher/chaos/__main__.py",
    "launcher/electra_launcher/cli/plans.py",
    "launcher/electra_launcher/cli/command_output.py",
    "launcher/electra_launcher/cli/corpus/submit.py",
    "launcher/electra_launcher/cli/main.py",
    "launcher/electra_launcher/cli/models.py",
    "launcher/electra_launcher/cli/runs.py",
)
SAFE = ("printable", "error_line", "as_json")


def test_every_line_that_is_printed_goes_through_the_escapes() -> None:
    """Each `print` of the packages has a constant text, or one that a function of `SAFE` made."""
    unsafe = []
    for path in sorted([*ROOT.glob("electra_dist/**/*.py"), *ROOT.glob("launcher/**/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if name != "electra_dist/console.py":
            assert "rich.console import Console" not in text, name
            assert "markup=True" not in text, name
        if name in OWN_OUTPUT:
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"):
                continue
            if not all(isinstance(value, ast.Constant) or is_safe(value) for value in node.args):
                unsafe.append(f"{name}:{node.lineno}")
    assert unsafe == []


def is_safe(value: ast.expr) -> bool:
    """Return whether an argument of `print` is the result of a function of `SAFE`."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in SAFE
