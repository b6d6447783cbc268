"""Writes the picture and the table of rooms for docs/architecture.md (`make docs`).

Floors come from the contracts of import-linter in pyproject.toml, sentences from the rooms' own docstrings.
`tests/style/test_rooms.py` checks the ways of put and get against the imports, and fails when page or picture is stale.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "architecture.md"
PICTURE: Final = ROOT / "docs" / "rooms.svg"
BEGIN: Final = "<!-- rooms: written by make docs -->\n"
END: Final = "<!-- end of rooms -->\n"
PACKAGES: Final = ("cli", "gateway", "fuse", "engine", "lakefs")

PUT: Final = [
    "lakefs.client",
    "lakefs.lake",
    "lakefs.put",
    "lakefs.wire",
    "engine.server",
    "engine.requests",
    "engine.chunks",
    "engine.segments",
    "engine.namespace",
    "engine.metadata",
    "engine.journal",
]
"""Rooms that a put through the native protocol passes, in order."""
GET: Final = [
    "lakefs.client",
    "lakefs.lake",
    "lakefs.get",
    "lakefs.wire",
    "engine.server",
    "engine.requests",
    "engine.namespace",
    "engine.tables",
    "lakefs.grants",
]
"""Rooms that a get passes: `lakefs.grants` reads the bytes, at the place that the engine answered."""

_WIDTH: Final = 1160
_ROW: Final = 30
_PUT_COLOUR: Final = "#d55e00"
_GET_COLOUR: Final = "#0072b2"


def floors() -> dict[str, list[list[str]]]:
    """Package -> its floors, the highest first -> rooms and modules on it, in the order of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    return {
        contract["containers"][0]: [[room.strip() for room in floor.split("|")] for floor in contract["layers"]]
        for contract in contracts
        if "containers" in contract
    }


def rooms() -> list[str]:
    """Every folder of the product with modules in it, as `engine/journal`: packages first, then their rooms."""
    folders = [path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    return [str(folder) for folder in sorted(folders, key=lambda folder: (PACKAGES.index(folder.parts[0]), folder))]


def sentence(room: str) -> str:
    """The first paragraph of the room's docstring, on one line."""
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def table() -> str:
    """The table of rooms, in Markdown."""
    rows = [f"| `{room}/` | {sentence(room)} |" for room in rooms()]
    return "\n".join(["| room | what is in it |", "|---|---|", *rows]) + "\n"


def picture() -> str:
    """The floors of all packages as SVG, with the ways of one put and one get numbered."""
    all_floors = floors()
    third = (_WIDTH - 40) // 3
    middle = 40 + _height(all_floors["cli"])
    bottom = middle + 20 + _height(all_floors["engine"])
    drawn = [
        *_panel("cli", all_floors["cli"], 0, 20, _WIDTH),
        *_panel("gateway", all_floors["gateway"], 0, middle, third),
        *_panel("gateway.s3", all_floors["gateway.s3"], 0, middle + 10 + _height(all_floors["gateway"]), third),
        *_panel("fuse", all_floors["fuse"], third + 20, middle, third - 100),
        *_panel("engine", all_floors["engine"], 2 * third - 60, middle, third + 100),
        *_panel("lakefs", all_floors["lakefs"], 0, bottom, _WIDTH),
    ]
    height = bottom + _height(all_floors["lakefs"]) + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            _badge(10, 9, 1, _PUT_COLOUR),
            _text(24, 13, "rooms of one put, in the order in which they are entered", 13),
            _badge(430, 9, 1, _GET_COLOUR),
            _text(444, 13, "rooms of one get.  A room imports only from floors below its own.", 13),
            *drawn,
            "</svg>\n",
        ]
    )


def _height(package: list[list[str]]) -> int:
    return 26 + _ROW * len(package)


def _panel(package: str, levels: list[list[str]], x: int, y: int, width: int) -> Iterator[str]:
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{_height(levels)}" rx="6" fill="#eef1f4"/>'
    yield _text(x + 8, y + 16, package, 13, bold=True)
    for number, level in enumerate(levels):
        step = (width - 12) / len(level)
        for place, room in enumerate(level):
            yield from _box(f"{package}.{room}", x + 6 + place * step, y + 22 + number * _ROW, step - 4)


def _box(room: str, x: float, y: float, width: float) -> Iterator[str]:
    yield (
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{_ROW - 4}" rx="3" fill="#ffffff" stroke="#9aa5b1"/>'
    )
    yield _text(x + 6, y + 17, room.rsplit(".", 1)[1], 12)
    right = x + width - 12
    for way, colour in ((GET, _GET_COLOUR), (PUT, _PUT_COLOUR)):
        if room in way:
            yield _badge(right, y + 13, way.index(room) + 1, colour)
            right -= 19


def _badge(x: float, y: float, number: int, colour: str) -> str:
    digits = _text(x, y + 4, str(number), 11, colour="#ffffff", middle=True)
    return f'<circle cx="{x:.0f}" cy="{y}" r="9" fill="{colour}"/>{digits}'


def _text(
    x: float, y: float, words: str, size: int, *, bold: bool = False, colour: str = "#1f2933", middle: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:.0f}" y="{y}" font-size="{size}" fill="{colour}"{weight}{anchor}>{escape(words)}</text>'


def page() -> str:
    """docs/architecture.md with the table of rooms as it is today."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table() + END + tail


if __name__ == "__main__":
    PAGE.write_text(page())
    PICTURE.write_text(picture())
