"""Plain English: patterns that docstrings, comments and documents keep out.

A docstring begins with a verb or with the thing itself.  The phrases below have a plainer word: returns, logs, sends.
"""

from __future__ import annotations

import ast
import re
import tokenize

import pytest

from tests.style.source_tree import ROOT, product_files, python_files, statements, tracked_files

BEGINNING = re.compile(r"(What|Who|Whom|Whose|Those|Of|By|Whether|How|As)\b")
PHRASE = re.compile(r"\b(is|are|was|were|be|been) told\b", re.IGNORECASE)
SOURCES = [*product_files(), *(path for path in python_files() if path.parts[0] in ("bench", "scripts", "tests"))]
DOCUMENTS = [path for path in tracked_files() if path.suffix == ".md" and path.parts[0] in ("docs", "README.md")]


def _docstrings(source: str) -> list[tuple[int, str]]:
    """Return line and text of every string that stands for itself: docstrings of modules, definitions and fields."""
    return [
        (node.lineno, node.value.value.strip())
        for node in statements(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def _comments(source: str) -> list[tuple[int, str]]:
    lines = iter(source.splitlines(keepends=True))
    tokens = tokenize.generate_tokens(lambda: next(lines, ""))
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def _not_plain(source: str) -> list[int]:
    """Return lines whose docstring begins with a wrong word, or whose docstring or comment has a wrong phrase."""
    docstrings = _docstrings(source)
    begun = [line for line, text in docstrings if BEGINNING.match(text)]
    if not PHRASE.search(source):
        return begun
    return begun + [line for line, text in docstrings + _comments(source) if PHRASE.search(text)]


def test_docstrings_and_comments_are_plain() -> None:
    found = {str(path): lines for path in SOURCES if (lines := _not_plain((ROOT / path).read_text()))}
    assert found == {}


def test_documents_are_plain() -> None:
    found = [
        (str(path), number)
        for path in DOCUMENTS
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if PHRASE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source", ['def f() -> int:\n    """What is left."""\n', "# the caller is told\n", 'X = 1\n"""Of a segment."""\n']
)
def test_a_planted_pattern_is_noticed(source: str) -> None:
    assert _not_plain(source) != []
