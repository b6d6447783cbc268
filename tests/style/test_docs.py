"""The documents name paths and tests that exist, link to pages and headings that exist, and stay short and plain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.style.source_tree import ROOT

DOCUMENTS: Final = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MEASURED: Final = "performance"
"""Pages and folder that the bench writes: long lines, and words on modules of the version that was measured."""
LINE_MAX: Final = 120
WORDS_MAX: Final = {"docs/architecture.md": 3500, "docs/performance.md": 1500}
"""Pages that are read first, and whole."""

_PATH: Final = re.compile(r"(?<![\w./-])(?:engine|lakefs|cli|fuse|gateway|tests|bench)/[\w./-]*\w")
_TEST: Final = re.compile(r"(?<![\w.-])([\w/]*\btest_\w+\.py)(?:::(\w+))?")
_BUILT: Final = "bench/out"
_TOLD: Final = re.compile(r"\b(?:am|is|are|was|were|be|been|being|not)\s+told\b", re.IGNORECASE)
_FENCE: Final = "```"
_LINK: Final = re.compile(r"\]\((?!https?:|mailto:)([^()\s#]*)(?:#([^()\s]+))?\)")
_HEADING: Final = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


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


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


def broken_links(page: Path, text: str) -> list[str]:
    """Return links of a page to files of the checkout, or to headings in them, that do not exist."""
    broken: list[str] = []
    for path, anchor in _LINK.findall(text):
        target = page.parent / path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text() if path else text)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    return broken


def told_phrases(text: str) -> list[str]:
    """Return the forbidden phrases of a document, over line breaks too."""
    return _TOLD.findall(text)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _measured(path: Path) -> bool:
    return MEASURED in (path.stem, path.parent.name)


@pytest.fixture(params=DOCUMENTS, ids=_name)
def document(request: pytest.FixtureRequest) -> Path:
    """Each document in turn."""
    path = request.param
    assert isinstance(path, Path)
    return path


def test_every_path_in_a_document_exists(document: Path) -> None:
    if not _measured(document):
        assert missing_paths(document.read_text()) == []


def test_every_test_in_a_document_exists(document: Path) -> None:
    assert missing_tests(document.read_text()) == []


def test_every_link_of_a_document_leads_to_a_page_and_a_heading(document: Path) -> None:
    assert broken_links(document, document.read_text()) == []


@pytest.mark.parametrize("name", sorted(WORDS_MAX))
def test_a_page_that_is_read_first_is_short(name: str) -> None:
    words = len((ROOT / name).read_text().split())
    assert words <= WORDS_MAX[name], "move what only some readers need to a page of its own"


def test_lines_of_a_document_are_short(document: Path) -> None:
    if not _measured(document):
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
    page = ROOT / "docs" / "planted.md"
    links = "# A `b`, c\n[1](#a-b-c) [2](#gone) [3](architecture.md#rooms) [4](gone.md) [5](architecture.md#gone)"
    assert broken_links(page, links) == ["#gone", "gone.md", "architecture.md#gone"]
    assert told_phrases("A client is\ntold nothing. Watchers ARE told.") == ["is\ntold", "ARE told"]
