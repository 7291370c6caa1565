"""What help pages quote, list and call by name is what the program prints, reads and exports."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import pooch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LEAST = 8  # characters of a part of a literal that count as found
SOURCES = sorted((ROOT / "pooch").rglob("*.py"))
USER_PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("auto", "entries", "frameworks", "how-to", "index", "tutorial")),
)


@cache
def literals() -> str:
    """All texts in the sources, with a character around each that no message has; those of f-strings in their parts."""
    trees = (ast.walk(ast.parse(path.read_text())) for path in SOURCES)
    texts = (node.value for tree in trees for node in tree if isinstance(node, ast.Constant))
    return "\0".join(("", *(text for text in texts if isinstance(text, str)), ""))


def is_printed(message: str) -> bool:
    """Whether the words of a message between its names and figures are put together from texts in the sources."""
    return all(_is_put_together(part) for part in re.split(r"\.\.\.|\d[\d.,x%]*|\b[KMG]?i?B\b", message))


def _is_put_together(part: str, is_first: bool = True) -> bool:
    """Whether a text is a row of whole literals. The first may lack its beginning, and the last its end."""
    begin = "" if is_first else "\0"
    if not part or ((len(part) >= LEAST or is_first) and f"{begin}{part}" in literals()):
        return True
    for end in range(len(part), 0, -1):
        is_whole = f"\0{part[:end]}\0" in literals()
        is_end_of_one = is_first and end >= LEAST and f"{part[:end]}\0" in literals()
        if (is_whole or is_end_of_one) and _is_put_together(part[end:], False):
            return True
    return False


def quoted(page: str) -> list[str]:
    """Messages on a page: blocks of text, and cells of tables that are called so."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"```text\n(.*?)\n```", text, re.DOTALL)
    table = text.partition("| cause in the message |")[2].partition("\n\n")[0]
    return [" ".join(block.split()) for block in blocks] + re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)


QUOTING = ("trouble.md", "auto.md", "persistent.md", "several_devices.md")


@pytest.mark.parametrize("message", [message for page in QUOTING for message in quoted(page)])
def test_each_message_on_a_page_is_one_that_the_program_prints(message: str) -> None:
    assert is_printed(message)


def test_a_message_that_was_reworded_is_noticed() -> None:
    message = quoted("trouble.md")[0]
    assert not is_printed(message.replace("smallest feasible", "least possible"))
    assert not is_printed(message.replace("ask for", "take"))


def test_what_readme_shows_of_a_run_is_what_the_program_prints() -> None:
    shown = re.findall(r"^pooch: (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(shown) >= 4
    for line in shown:
        assert is_printed(line), line


def test_each_environment_variable_that_is_read_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "environment.md").read_text()
    code = "\n".join(path.read_text() for path in SOURCES)
    own = set(re.findall(r"\bPOOCH_[A-Z_]+\b", code))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", code))
    assert {"POOCH_SPILL_DIRECTORY", "POOCH_CACHE_DIRECTORY"} <= own
    assert {"XDG_CONFIG_HOME", "CXX"} <= read
    for name in sorted(own | read):
        assert f"`{name}`" in page, name


def test_each_public_name_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    described = {line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    errors = {
        name
        for name in pooch.__all__
        if isinstance(value := getattr(pooch, name), type) and issubclass(value, Exception)
    }
    assert "errors" in described
    assert set(pooch.__all__) - errors <= described
    assert re.findall(r"^::: (\S+)$", page, re.MULTILINE)[0].endswith(".auto"), "the first one that a user looks for"


@pytest.mark.parametrize("page", USER_PAGES)
def test_snippets_for_users_import_the_name_that_is_installed(page: str) -> None:
    text = (ROOT / page).read_text()
    for block in re.findall(r"```(?:python|console)\n(.*?)```", text, re.DOTALL):
        assert not re.search(r"^\s*(import pooch\b(?!_)|from pooch\b(?!_))|-m pooch\b(?!_)", block, re.MULTILINE), block


def test_user_pages_come_before_those_about_how_it_works() -> None:
    pages = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    first = ["index", "tutorial", "how-to", "entries", "auto", "frameworks", "trouble", "glossary", "limits"]
    places = [pages.index(f"{name}.md") for name in first]
    assert max(places) < pages.index("architecture.md")
