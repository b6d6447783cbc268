"""The document's table of operations has the answers that a mount gives."""

from __future__ import annotations

from tests.mount.operations import documented, table


def test_the_documented_answers_are_those_of_a_mount() -> None:
    assert documented() == table(), "write it anew with: python -m tests.mount.operations"
