"""The picture and the table of rooms in docs/architecture.md, and docs/glossary.md, are those of the code as it is."""

from __future__ import annotations

import re
from itertools import pairwise

import grimp
import pytest

from scripts.rooms import GET, PACKAGES, PAGE, PICTURE, PUT, floors, page, picture, rooms, sentence
from tests.style.source_tree import ROOT, product_files

GLOSSARY = ROOT / "docs" / "glossary.md"
BY_THE_PORT = {("lakefs.wire", "engine.server"), ("engine.server", "engine.requests")}
"""Steps without an import: over the socket, and through the port that `engine.requests` implements."""
ANSWERED = {("engine.tables", "lakefs.grants")}
"""The step back to the client."""


def test_page_and_picture_are_what_make_docs_writes_today() -> None:
    assert PAGE.read_text() == page(), "run: make docs"
    assert PICTURE.read_text() == picture(), "run: make docs"


def test_every_room_says_in_a_sentence_what_is_in_it() -> None:
    assert [room for room in rooms() if not re.fullmatch(r"`?[A-Za-z].{15,}\.", sentence(room))] == []


def test_the_picture_shows_every_room() -> None:
    shown = {
        f"{package}.{room}".replace(".", "/")
        for package, levels in floors().items()
        for level in levels
        for room in level
    }
    inner = {room for room in rooms() if room.count("/") >= 1}
    assert {room for room in inner if not room.startswith(("lakefs/client/", "lakefs/plugins/"))} - shown == set()


@pytest.mark.parametrize("way", [PUT, GET], ids=["put", "get"])
def test_each_step_of_the_ways_follows_an_import(way: list[str]) -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)

    def imports(upper: str, lower: str) -> bool:
        within = {lower, *graph.find_descendants(lower)}
        return any(
            graph.find_modules_directly_imported_by(module) & within
            for module in (upper, *graph.find_descendants(upper))
        )

    entered: list[str] = []
    for before, after in pairwise(way):
        entered.append(before)
        if (before, after) not in BY_THE_PORT | ANSWERED:
            assert any(imports(room, after) for room in entered), (before, after)
    assert not imports("engine.segments", "engine.namespace"), "or any step would pass"


def _glossary() -> dict[str, str]:
    rows = GLOSSARY.read_text().partition("|---|---|\n")[2]
    return dict(re.findall(r"^\| ([a-z0-9][^|]*?) \| (.*) \|$", rows, re.MULTILINE))


def test_each_term_of_the_glossary_is_used_in_the_code() -> None:
    code = " ".join("\n".join((ROOT / path).read_text() for path in product_files()).lower().replace("_", " ").split())
    unused = [term for term in _glossary() if not re.search(rf"\b{re.escape(term)}(s|es)?\b", code)]
    assert len(_glossary()) > 30
    assert unused == []


def test_each_room_s_name_is_in_the_glossary_or_is_its_package_s() -> None:
    terms = " ".join(_glossary())
    names = {room.rsplit("/", 1)[-1] for room in rooms()}
    assert [name for name in sorted(names) if name.replace("_", " ").removesuffix("s") not in terms] == []
