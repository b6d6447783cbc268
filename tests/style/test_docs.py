"""The documents name paths and tests that exist, keep their lines short, and avoid phrases of translated prose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.style.source_tree import ROOT

DOCUMENTS: Final = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
MEASURED: Final = "performance.md"
"""Written by the bench: long lines, and profiles that name the modules of the version that was measured."""
LINE_MAX: Final = 120

_PATH: Final = re.compile(r"(?<![\w./-])(?:engine|lakefs|cli|fuse|gateway|tests|bench)/[\w./-]*\w")
_TEST: Final = re.compile(r"(?<![\w.-])([\w/]*\btest_\w+\.py)(?:::(\w+))?")
_BUILT: Final = "bench/out"
_TOLD: Final = re.compile(r"\b(?:am|is|are|was|were|be|been|being|not)\s+told\b", re.IGNORECASE)
_FENCE: Final = "```"


def missing_paths(text: str) -> list[str]:
    """Return paths of packages that the checkout lacks; output folders and `NAME` placeholders are no such paths."""
    return [
        path
        for path in _PATH.findall(text)
        if not path.startswith(_BUILT) and not path.endswith("NAME.jsonl") and not (ROOT / path).exists()
    ]


def missing_tests(text: str) -> list[str]:
    """Return test files that do not exist at the path given, or have no test of that name."""
    return [
        f"{file}::{test}"
        for file, test in _TEST.findall(text)
        if not (ROOT / file).is_file()
        or (test and not re.search(rf"^(?:async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE))
    ]


def long_lines(text: str) -> list[str]:
    """Return lines that are too long and could be wrapped: no table rows, no code, no single word such as a link."""
    found: list[str] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith(_FENCE)
        if fenced or line.startswith(("|", "    ")) or len(line.split()) == 1:
            continue
        if len(line) > LINE_MAX:
            found.append(line)
    return found


def told_phrases(text: str) -> list[str]:
    """Return the forbidden phrases of a document, over line breaks too."""
    return _TOLD.findall(text)


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def document(request: pytest.FixtureRequest) -> Path:
    """Each document in turn."""
    path = request.param
    assert isinstance(path, Path)
    return path


def test_every_path_in_a_document_exists(document: Path) -> None:
    if document.name != MEASURED:
        assert missing_paths(document.read_text()) == []


def test_every_test_in_a_document_exists(document: Path) -> None:
    assert missing_tests(document.read_text()) == []


def test_lines_of_a_document_are_short(document: Path) -> None:
    if document.name != MEASURED:
        assert long_lines(document.read_text()) == []


def test_nothing_is_told_in_a_document(document: Path) -> None:
    assert told_phrases(document.read_text()) == []


def test_a_planted_fault_of_each_kind_is_found() -> None:
    assert missing_paths("see `engine/gone.py`, bench/out/x and `engine/host`") == ["engine/gone.py"]
    assert missing_tests("`tests/style/test_docs.py::test_gone`, `test_docs.py`") == [
        "tests/style/test_docs.py::test_gone",
        "test_docs.py::",
    ]
    assert missing_tests("`tests/style/test_docs.py::test_a_planted_fault_of_each_kind_is_found`") == []
    long = "word " * 30
    assert long_lines(f"{long}\n| {long} |\n{_FENCE}\n{long}\n{_FENCE}\n{'x' * 200}") == [long]
    assert told_phrases("A client is\ntold nothing. Watchers ARE told.") == ["is\ntold", "ARE told"]
