"""The steps that inputs take in the product's code, from one line to another, as the interpreter traces them.

An input that takes a step which none took before is worth changing further: so the search follows the readers into
their corners.  Tracing makes them some ten times slower, so only a part of the inputs is traced, and all others gain
from what that part found.  The inside of C libraries is not traced; only the error that they refuse an input with is
seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_OURS: Final = tuple(f"{_ROOT / room}/" for room in ("cli", "engine", "fuse", "gateway", "lakefs"))
_LINE_BITS: Final = 16


class Coverage:
    """The steps that were taken so far."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self._outcomes: set[str] = set()
        self._codes: dict[CodeType, int] = {}
        """Number of each function, 0 for those that are not ours."""

    def is_new(self, read: Callable[[bytes], object], data: bytes) -> bool:
        """Return whether reading this takes a step, or has an outcome, that is new.  An error of `read` is raised."""
        before = len(self.steps) + len(self._outcomes)
        sys.settrace(self._enter)
        try:
            outcome = read(data)
        finally:
            sys.settrace(None)
        self._outcomes.add(type(outcome).__name__)
        return len(self.steps) + len(self._outcomes) > before

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        number = self._codes.get(code)
        if number is None:
            number = len(self._codes) + 1 if code.co_filename.startswith(_OURS) else 0
            self._codes[code] = number
        if not number:
            return None
        steps, base, previous = self.steps, number << 2 * _LINE_BITS, 0

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal previous
            if event == "line":
                steps.add(base | previous << _LINE_BITS | frame.f_lineno)
                previous = frame.f_lineno
            return step

        return step
