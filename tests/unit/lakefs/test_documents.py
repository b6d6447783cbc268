"""The documents have what the code has: fixed layouts, tables of the index, requests of the protocol."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest

from engine.format.layouts import Table
from lakefs import layout
from lakefs.wire.messages import REQUESTS
from tests.style.source_tree import ROOT, parsed, product_files

FORMAT: Final = "docs/format.md"
PROTOCOL: Final = "docs/protocol.md"

Row = tuple[int, int, str, str]


def _lines(page: str) -> list[str]:
    path = ROOT / page
    return path.read_text().splitlines() if path.exists() else []


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]


def _tables(page: str, header: list[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield (nearest heading, rows) of every table whose header row begins with those names."""
    heading, rows, inside = "", list[list[str]](), False
    for line in [*_lines(page), ""]:
        if line.startswith("#"):
            heading = line.lstrip("#").strip()
        if not line.startswith("|"):
            if inside:
                yield heading, rows
            inside = False
        elif inside:
            rows.append(_cells(line))
        elif _cells(line)[: len(header)] == header:
            inside, rows = True, []


def _documented_layouts() -> list[tuple[str, list[Row]]]:
    found = []
    for page in (FORMAT, PROTOCOL):
        for name, rows in _tables(page, ["offset", "size", "type", "field"]):
            fields = [(int(row[0]), int(row[1]), row[2], row[3]) for row in rows if set(row[0]) - set("-: ")]
            found.append((name, fields))
    return found


@cache
def _declared_layouts() -> dict[str, list[Row]]:
    for path in product_files():
        calls = (node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
        if any(isinstance(call, ast.Name) and call.id == "Layout" for call in calls):
            importlib.import_module(".".join(path.with_suffix("").parts))
    return {
        name: [(field.offset, field.size, field.code, field.name) for field in declared.fields]
        for name, declared in layout.registered().items()
    }


def test_every_layout_is_documented_exactly_once_and_nothing_else_is() -> None:
    assert sorted(name for name, _ in _documented_layouts()) == sorted(_declared_layouts())


@pytest.mark.parametrize(("name", "documented"), _documented_layouts(), ids=lambda value: str(value)[:24])
def test_a_documented_layout_is_the_declared_one(name: str, documented: list[Row]) -> None:
    assert documented == _declared_layouts()[name]


def test_the_documents_are_read_whole() -> None:
    documented = dict(_documented_layouts())
    assert documented["counter record"] == [(0, 8, "Q", "count")]
    assert len(documented["superblock"]) == 18
    assert len(documented) >= 15


def test_the_tables_of_the_index_are_documented_with_their_ids() -> None:
    [(_, rows)] = _tables(FORMAT, ["table", "id", "key", "value"])
    documented = {row[0]: int(row[1]) for row in rows if row[1].isdigit()}
    assert documented == {table.name.lower(): table.value for table in Table}


def test_every_request_is_documented_with_its_number_and_reply() -> None:
    documented: dict[int, tuple[str, str]] = {}
    for _, rows in _tables(PROTOCOL, ["op", "name"]):
        numbered = [row for row in rows if row[0].isdigit()]
        assert not set(documented) & {int(row[0]) for row in numbered}
        documented |= {int(row[0]): (row[1], row[3]) for row in numbered}
    declared = {op: request.__name__ for op, request in REQUESTS.items()}
    assert {op: name for op, (name, _) in documented.items()} == declared
    replies = {op: re.sub(r"\W.*", "", reply) for op, (_, reply) in documented.items()}
    assert replies == {op: request.REPLY.__name__ for op, request in REQUESTS.items()}


def test_every_request_has_a_number_of_its_own() -> None:
    declarations = [
        node.name
        for path in (ROOT / "lakefs/wire").glob("*.py")
        for node in ast.walk(parsed(path.relative_to(ROOT)))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Request" for base in node.bases)
    ]
    assert len(declarations) == len(REQUESTS), "two requests share a number"
