"""The members of this machine: each is a process of its own, kept running by the process that serves the lake.

In a folder that holds nothing any more no member is started: it would be another one.  It is looked for again and
again: its disk may be mounted, or the operator may want a new member there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.lake.children import Child, Children


@dataclass(frozen=True)
class MemberPlan:
    """One member: its folder, the socket at which it listens, and the command of its process (`ChildPlan`).

    `is_wanted` says if the process may be started again: not in a folder that holds nothing any more.  Blocks.
    """

    folder: Path
    socket: Path
    command: Sequence[str]
    is_wanted: Callable[[], bool] = lambda: True
    descriptors: Sequence[int] = ()
    title: str = "a member"

    def about(self) -> dict[str, str]:
        """See `ChildPlan`."""
        return {"folder": str(self.folder)}

    def unwanted_because(self) -> str:
        """See `ChildPlan`."""
        return "" if self.is_wanted() else "the folder holds nothing any more: is its disk mounted?"


MemberProcess = Child[MemberPlan]
MemberProcesses = Children[MemberPlan]
