"""The tests that documents name for their sentences exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.style.source_tree import ROOT

POINTER = re.compile(r"`(tests/[\w/]+?\.py)(?:::(\w+))?`")
FOLDER = re.compile(r"`(tests/\w+)`")
DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))
PROMISE = re.compile(r"^- \*\*.*?(?=^- \*\*|^$)", re.MULTILINE | re.DOTALL)


def missing(text: str) -> list[str]:
    found: list[str] = []
    for file, test in POINTER.findall(text):
        path = ROOT / file
        if not path.is_file() or (test and f"\ndef {test}(" not in path.read_text()):
            found.append(f"{file}::{test}" if test else file)
    return found + [folder for folder in FOLDER.findall(text) if not (ROOT / folder).is_dir()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_document_names_is_there(document: Path) -> None:
    assert missing(document.read_text()) == []


def test_a_pointer_to_nothing_is_noticed() -> None:
    text = "`tests/unit/repo/test_pointers.py::test_that_nobody_wrote`, `tests/unit/test_gone.py`, `tests/nowhere`"
    assert len(missing(text)) == 3


def test_each_promise_of_durability_names_a_test_below_it() -> None:
    section = (ROOT / "docs" / "durability.md").read_text().partition("\n## Promises\n")[2].partition("\n## ")[0]
    promises = PROMISE.findall(section)
    assert len(promises) >= 20
    assert [promise for promise in promises if not POINTER.search(promise.partition("  - Tests:")[2])] == []


def test_the_promises_and_the_threats_name_tests() -> None:
    assert len(POINTER.findall((ROOT / "docs/security.md").read_text())) >= 30
    assert len(POINTER.findall((ROOT / "docs/durability.md").read_text())) >= 10
