"""Plain English: patterns that docstrings, comments and documents keep out.

A docstring begins with a verb or with the thing itself.  The phrases below have a plainer word: returns, logs, sends.
"""

from __future__ import annotations

import ast
import re
import tokenize

import pytest

from tests.style.source_tree import ROOT, native_files, product_files, python_files, statements, tracked_files

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


C_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
CYTHON_COMMENT = re.compile(r'"""(.*?)"""|#([^\n]*)', re.DOTALL)


NATIVE_RATCHET: dict[str, int] = {
    "engine/host/_io_uring.pyx": 1,
    "engine/tables/_frequency.pyx": 2,
    "fuse/native/appends.h": 1,
    "fuse/native/layer.h": 5,
    "gateway/http/door.h": 1,
    "gateway/s3/door/_repeater.pyx": 3,
    "lakefs/granules/place.h": 1,
    "lakefs/known/_known.pyx": 1,
}
"""Comments of native sources that are not plain, by file: may only shrink."""


def _native_not_plain(source: str, pattern: re.Pattern[str]) -> list[int]:
    """Return lines on which a comment or docstring with a wrong phrase, or a docstring with a wrong word, begins."""
    found = []
    for match in pattern.finditer(source):
        text = (match[1] or match[match.lastindex or 1] or "").strip()
        is_docstring = match[0].startswith('"""')
        if PHRASE.search(" ".join(text.split())) or (is_docstring and BEGINNING.match(text)):
            found.append(source.count("\n", 0, match.start()) + 1)
    return found


def test_docstrings_and_comments_are_plain() -> None:
    found = {str(path): lines for path in SOURCES if (lines := _not_plain((ROOT / path).read_text()))}
    assert found == {}


def test_comments_of_native_sources_are_plain() -> None:
    texts = {path: (ROOT / path).read_text() for path in native_files()}
    assert len(texts) > 20
    patterns = {".h": (C_COMMENT,), ".pyx": (CYTHON_COMMENT, C_COMMENT), ".pxd": (CYTHON_COMMENT, C_COMMENT)}
    found = {
        str(path): lines
        for path, text in texts.items()
        if (lines := [line for pattern in patterns[path.suffix] for line in _native_not_plain(text, pattern)])
    }
    assert {path: lines for path, lines in found.items() if len(lines) > NATIVE_RATCHET.get(path, 0)} == {}
    counts = {path: len(found.get(path, ())) for path in NATIVE_RATCHET}
    assert counts == NATIVE_RATCHET, "there are fewer by now: lower the ratchet"


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("int a; /* the caller is\n   told */", C_COMMENT),
        ("cdef int a  # the caller is told\n", CYTHON_COMMENT),
        ('def f():\n    """What is left."""\n', CYTHON_COMMENT),
    ],
)
def test_a_planted_pattern_in_a_native_source_is_noticed(source: str, pattern: re.Pattern[str]) -> None:
    assert _native_not_plain(source, pattern) != []


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
