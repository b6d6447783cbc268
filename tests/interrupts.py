"""Interrupts (Ctrl-C) of one thread wherever Python would take them, and whether another thread's work still ends."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Final

WAIT_S: Final = 30


class Interrupter:
    """Raises KeyboardInterrupt at the n-th place at which calls of a module can be interrupted.

    Such are the module's lines and the return of each function of Python's library that is written in Python.  Not a
    `with` and its `pass`: trace events also happen between a block and its exit, where Python takes no signal.
    """

    def __init__(self, module: ModuleType, at: int) -> None:
        self._file = module.__file__
        self.left = at
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if "/tests/" in code.co_filename:
            return None
        line = linecache.getline(code.co_filename, frame.f_lineno).lstrip()
        if code.co_filename == self._file:
            is_taken = event == "line" and not line.startswith(("with ", "pass"))
        else:
            is_taken = event == "return"
        if is_taken:
            self.left -= 1
            if self.left == 0:
                self.where = f"{code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self

    def interrupt(self, call: Callable[[], object]) -> bool:
        """Do a call; return True if it was interrupted, False if it has no place as far on as that."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.left <= 0


def ends(call: Callable[[], object]) -> bool:
    """Return True if a call ends, within WAIT_S; it is made in a thread of its own."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()
