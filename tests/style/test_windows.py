"""Checks that each count of requests, or pieces of work, in flight is a row of the table in `lakefs/limits.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

import pytest

from lakefs import limits
from lakefs.host.buffers import BUFFER_BYTES
from tests.style.source_tree import ROOT, parsed, product_files

WINDOWED: Final = {"Pipeline", "Semaphore", "CapacityLimiter"}
ROW: Final = re.compile(r"^# ([A-Z][A-Z0-9_]+) +(\d+) (KiB|MiB) +(\d+) (KiB|MiB) +(\d+)  \S", re.MULTILINE)
UNITS: Final = {"KiB": limits.KIB, "MiB": limits.MIB}


def _windows(module: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Yield the calls that bound what is in flight, and the limits that their count uses; none for any other count.

    The count is a limit, or a limit times an option of the caller's.
    """
    known = {
        alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.module == "lakefs.limits"
        for alias in node.names
    }
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or _name(node.func) not in WINDOWED:
            continue
        factors = [part for count in node.args for part in _factors(count)]
        names = {part.id for part in factors if isinstance(part, ast.Name)}
        is_named = names <= known and all(isinstance(part, ast.Name | ast.Attribute) for part in factors)
        yield f"{node.lineno}: {ast.unparse(node)}", names if is_named else set()


def _name(function: ast.expr) -> str:
    """Return the last part of a function's name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _factors(count: ast.expr) -> list[ast.expr]:
    if isinstance(count, ast.BinOp) and isinstance(count.op, ast.Mult):
        return _factors(count.left) + _factors(count.right)
    return [count]


def test_every_window_is_one_of_the_limits() -> None:
    odd = [f"{path}:{call}" for path in product_files() for call, names in _windows(parsed(path)) if not names]
    assert odd == []


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("Pipeline(STORE_WINDOW)", {"STORE_WINDOW"}),
        ("Pipeline(STORE_WINDOW * options.jobs)", {"STORE_WINDOW"}),
        ("trio.Semaphore(STORE_WINDOW)", {"STORE_WINDOW"}),
        ("Pipeline(4)", set()),
        ("Pipeline(2 * STORE_WINDOW)", set()),
        ("Pipeline(2 * options.jobs)", set()),
        ("Pipeline(options.jobs)", set()),
        ("Pipeline(WINDOW)", set()),
        ("trio.CapacityLimiter(WINDOW)", set()),
    ],
)
def test_a_window_of_another_place_would_be_seen(call: str, names: set[str]) -> None:
    module = ast.parse(f"from lakefs.limits import STORE_WINDOW\nWINDOW = 4\n{call}")
    assert [found for _, found in _windows(module)] == [names]


def test_the_table_of_windows_is_what_is_used_and_says_what_it_is() -> None:
    rows = ROW.findall((ROOT / "lakefs/limits.py").read_text())
    used = {name for path in product_files() for _, names in _windows(parsed(path)) for name in names}
    assert {name for name, *_ in rows} == used
    for name, one, one_unit, all_, all_unit, count in rows:
        assert int(count) == getattr(limits, name), name
        assert int(one) * UNITS[one_unit] * int(count) == int(all_) * UNITS[all_unit], name


def test_windows_fit_in_what_bounds_them() -> None:
    request_buffers = limits.STORE_REQUEST_BYTES // limits.CHUNK_BYTES
    buffers = limits.BUFFER_POOL_BYTES // BUFFER_BYTES
    assert limits.STORE_WINDOW * request_buffers < buffers
    assert limits.WRITE_BEHIND_FILES * limits.WRITE_BEHIND_WINDOW * request_buffers < buffers
    assert limits.INFLIGHT_PER_CONNECTION >= 2 * limits.COPY_WINDOW
    assert 2 * limits.CLIENT_THREADS == limits.CHECK_WINDOW == limits.LOAD_WINDOW == limits.WRITE_FILES_WINDOW
    s3_buffers = limits.S3_RECEIVE_BYTES // BUFFER_BYTES
    assert s3_buffers >= 15 * limits.S3_STORE_WINDOW
