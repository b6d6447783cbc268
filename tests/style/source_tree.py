"""The checkout as the style tests see it: its files, modules and functions.

All files that git would commit count, committed or not; without git, all files but hidden and built folders. Parsed
modules are kept for the run, since every rule walks all of them.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PRODUCT_PACKAGES: Final = ("lakefs", "engine", "gateway", "fuse", "cli")

NATIVE: Final = (".h", ".pxd", ".pyx")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A function or class: its dotted name inside the module, and whether a caller outside may use it."""

    name: str
    node: Function | ast.ClassDef
    public: bool

    @property
    def line_count(self) -> int:
        """Physical lines, docstring included, decorators not."""
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1


@cache
def tracked_files() -> tuple[Path, ...]:
    """Return every file of the project that exists, relative to the root, sorted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        found = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        found = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        found = [path for path in found if not _is_built(path)]
    return tuple(sorted(path for path in found if (ROOT / path).is_file()))


def _is_built(path: Path) -> bool:
    hidden = any(part.startswith(".") and part != ".ci" for part in path.parts[:-1])
    return hidden or path.parts[0] in ("build", "dist") or "__pycache__" in path.parts


@cache
def python_files() -> tuple[Path, ...]:
    """Return every Python file of the project, relative to the root."""
    return tuple(path for path in tracked_files() if path.suffix == ".py")


@cache
def product_files() -> tuple[Path, ...]:
    """Return the Python files that are installed."""
    return tuple(path for path in python_files() if path.parts[0] in PRODUCT_PACKAGES)


def native_files() -> list[Path]:
    """Return every source of the product's native modules: Cython, its declarations, and headers in C."""
    return [path for path in tracked_files() if path.suffix in NATIVE and path.parts[0] in PRODUCT_PACKAGES]


@cache
def parsed(path: Path) -> ast.Module:
    """Return the module's syntax tree; its path is relative to the root."""
    return ast.parse((ROOT / path).read_bytes(), filename=str(path))


@cache
def definitions(path: Path) -> tuple[Definition, ...]:
    """Return every function and class of a module, nested ones too, in order of appearance."""
    return tuple(_definitions(parsed(path), prefix="", public=not _is_private(path.stem)))


def forget_trees() -> None:
    """Give the memory of syntax trees back: 300 MB when all files are parsed."""
    definitions.cache_clear()
    parsed.cache_clear()


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement, nested ones too.  What is in an expression is not looked at: no statement is."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.expr):
            yield from statements(node)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _definitions(parent: ast.AST, prefix: str, public: bool) -> Iterator[Definition]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.expr):
            continue
        if not isinstance(node, Function | ast.ClassDef):
            yield from _definitions(node, prefix, public)
            continue
        name = f"{prefix}{node.name}"
        visible = public and not _is_private(node.name)
        yield Definition(name, node, visible)
        inner_visible = visible and isinstance(node, ast.ClassDef)
        yield from _definitions(node, f"{name}.", inner_visible)
