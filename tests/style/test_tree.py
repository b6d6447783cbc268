"""Checks which files the tree has, and that none of them has a forbidden word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.style.source_tree import ROOT, definitions, parsed, product_files, python_files, statements, tracked_files

TOP_LEVEL: Final = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "bench",
    "cli", "debian-packages-dev.txt", "debian-packages-lab.txt", "debian-packages.txt", "deploy", "docs", "engine",
    "fuse", "gateway", "lab", "lakefs", "pyproject.toml", "requirements", "scripts", "systemd", "tests",
}  # fmt: skip

# Put together here, so that this file does not contain them either.
FORBIDDEN: Final = tuple(
    "".join(parts)
    for parts in (
        ("/wo", "rk/"),
        ("../", "shared"),
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("deb.", "debian.org"),
        ("registry.", "npmjs"),
        ("mirrors", "."),
        ("index", "-url"),
        ("find", "-links"),
        ("file:", "///"),
    )
)
LEFT_FOR_LATER: Final = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
VAGUE_MODULES: Final = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
PUBLIC_DOCS_SHARE: Final = 0.85


def _texts() -> Iterator[tuple[Path, str]]:
    for path in tracked_files():
        content = (ROOT / path).read_bytes()
        if b"\0" not in content:
            yield path, content.decode()


def test_every_top_level_name_is_one_that_the_design_has() -> None:
    assert {path.parts[0] for path in tracked_files()} - TOP_LEVEL == set()


def test_no_file_names_a_place_outside_the_product() -> None:
    found = [f"{path}: {word}" for path, text in _texts() for word in FORBIDDEN if word in text]
    assert found == []


def test_nothing_is_left_for_later() -> None:
    found = [f"{path}: {match[0]}" for path, text in _texts() for match in LEFT_FOR_LATER.finditer(text)]
    assert found == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [str(path) for path in python_files() if path.stem in VAGUE_MODULES] == []


def test_every_module_of_the_product_opens_with_a_header() -> None:
    bare = [str(path) for path in product_files() if parsed(path).body and not ast.get_docstring(parsed(path))]
    assert bare == []


def test_public_names_are_documented() -> None:
    public = [(path, found) for path in product_files() for found in definitions(path) if found.public]
    bare = [f"{path}:{found.name}" for path, found in public if not ast.get_docstring(found.node)]
    share = 1 - len(bare) / len(public)
    assert share >= PUBLIC_DOCS_SHARE, f"{share:.0%} documented; missing: {bare}"


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in names)


def _is_swallowed(handler: ast.ExceptHandler) -> bool:
    inner = [node for statement in handler.body for node in ast.walk(statement)]
    uses_it = any(isinstance(node, ast.Name) and node.id == handler.name for node in inner)
    logs = any(isinstance(node, ast.Attribute) and node.attr == "exception" for node in inner)
    return not (uses_it or logs or any(isinstance(node, ast.Raise) for node in inner))


def _handlers(module: ast.Module) -> list[ast.ExceptHandler]:
    tries = (node for node in statements(module) if isinstance(node, ast.Try | ast.TryStar))
    return [handler for node in tries for handler in node.handlers]


def test_no_broad_except_swallows_what_it_caught() -> None:
    swallowed = [
        f"{path}:{handler.lineno}"
        for path in python_files()
        for handler in _handlers(parsed(path))
        if _is_broad(handler) and _is_swallowed(handler)
    ]
    assert swallowed == []


def test_a_swallowing_handler_would_be_seen() -> None:
    handlers = _handlers(ast.parse("try: f()\nexcept (OSError, Exception): pass\ntry: f()\nexcept: raise"))
    assert [_is_broad(handler) and _is_swallowed(handler) for handler in handlers] == [True, False]
