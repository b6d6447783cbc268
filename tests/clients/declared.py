"""Collects the rows of the client matrix: the operations that each client's tests prove.

A test names the operations that it proves: `@works(...)`, or `@refused(...)` where the gateway properly refuses what
the client asks for.  A module names its `CLIENT`, and in it the operations that the client itself lacks. So every cell
of the matrix stands for a test, or for a statement that there is nothing to test.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

ROOT: Final = Path(__file__).resolve().parents[2]
OPERATIONS: Final = (
    "put",
    "get",
    "ranges",
    "list",
    "delete",
    "buckets",
    "multipart",
    "copy",
    "metadata",
    "checksums",
    "conditions",
    "presigned",
    "virtual host",
)
WORKS: Final = "works"
REFUSED: Final = "refused"
NOT_OFFERED: Final = "-"

Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True)
class Client:
    """A client, one row.  `package`: the one whose version is shown.  `also`: other uses of it, beside the columns.

    `lacks`: operations that the client does not offer, or its users have no use for.
    """

    name: str
    package: str
    lacks: tuple[str, ...] = ()
    also: str = ""


@dataclass
class Row:
    """A client and the outcome of each operation that its tests prove."""

    client: Client
    outcomes: dict[str, str] = field(default_factory=dict)


def works(*operations: str) -> Callable[[Test], Test]:
    """The test proves that these operations work."""
    return _outcome(WORKS, operations)


def refused(*operations: str) -> Callable[[Test], Test]:
    """The test proves that these operations are refused with a proper answer, and touch nothing."""
    return _outcome(REFUSED, operations)


def _outcome(outcome: str, operations: tuple[str, ...]) -> Callable[[Test], Test]:
    assert set(operations) <= set(OPERATIONS), operations

    def mark(test: Test) -> Test:
        found: dict[str, str] = getattr(test, "outcomes", {})
        test.outcomes = found | dict.fromkeys(operations, outcome)  # type: ignore[attr-defined]
        return test

    return mark


def rows() -> list[Row]:
    """Return one row for each test module, ordered by client.  Fails where two tests disagree about a cell."""
    found = [_row(path.stem) for path in sorted(Path(__file__).parent.glob("test_*.py"))]
    return sorted(found, key=lambda row: row.client.name.lower())


def _row(module_name: str) -> Row:
    module: Any = importlib.import_module(f"tests.clients.{module_name}")
    row = Row(module.CLIENT)
    for name, test in vars(module).items():
        for operation, outcome in getattr(test, "outcomes", {}).items():
            assert name.startswith("test_"), name
            assert row.outcomes.setdefault(operation, outcome) == outcome, f"{module_name}: {operation}"
    for operation in row.client.lacks:
        assert operation not in row.outcomes, f"{module_name}: {operation} is proven and said to be lacking"
        row.outcomes[operation] = NOT_OFFERED
    missing = [operation for operation in OPERATIONS if operation not in row.outcomes]
    assert not missing, f"{module_name}: nothing is said of {missing}"
    return row


def versions() -> dict[str, str]:
    """Return the versions that the tests install, by package."""
    locks = [ROOT / "requirements" / name for name in ("clients.txt", "clients-npm.txt")]
    pins = re.findall(r"^(\S+?)==(\S+)$", "\n".join(lock.read_text() for lock in locks), re.MULTILINE)
    return {name.lower().replace("-", "_"): version for name, version in pins}
