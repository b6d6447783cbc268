"""Bugs that a client which repeats answers may have, for the tests that show that a check can fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from lakefs.get.opened import Learned
from lakefs.known.known_names import KnownNames
from lakefs.stamps.stamps import STAMP


def look_at_no_stamps() -> Any:
    """Learn every answer with a stamp that hardly ever turns."""
    learn = KnownNames.learn

    def planted(self: KnownNames, answers: Sequence[Learned], epoch: int, *, is_opened: bool) -> None:
        value = 0
        held = [(name, stat, STAMP.pack(1, value) if stamps else b"") for name, stat, stamps in answers]
        learn(self, held, epoch, is_opened=is_opened)

    return mock.patch.object(KnownNames, "learn", planted)
