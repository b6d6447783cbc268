"""Which members are hurt: what may be asked of a lake now, and which losses it has to outlive.

A member is *hurt* while a fault lasts: it is away, cut off from a host, full, slow, or lost and not yet replaced.  It
*was hurt* until the lake says that it is healed behind that.  While no more than m members were hurt, every
acknowledged object is to be read, and every put is to be taken.
"""

from __future__ import annotations

import trio

PATIENCE_S = 40.0
"""A lake in which a fault begins or ends may refuse for so long: links that are away are tried every 5 s."""


class Health:
    """The faults of one world.  Members are named by their places."""

    def __init__(self, losses_max: int) -> None:
        self.losses_max = losses_max
        self.hurt: dict[str, int] = {}
        """Faults under way, by member."""
        self.was_hurt: set[str] = set()
        self.lost: set[str] = set()
        """Members whose devices were lost since the lake was last healed."""
        self.forgotten = 0
        """Number of members that came back as they had been before."""
        self.elsewhere = 0
        """Faults under way of names, of heads, and of ways between them."""
        self.unwell_since = -1e9

    def begin(self, member: str) -> None:
        """Note that a fault of a member begins."""
        self.hurt[member] = self.hurt.get(member, 0) + 1
        self.was_hurt.add(member)

    def end(self, member: str) -> None:
        """Note its end."""
        self.hurt[member] -= 1
        if not self.hurt[member]:
            del self.hurt[member]

    def begin_elsewhere(self) -> None:
        """Note that a fault of names, a head or a way between them begins."""
        self.elsewhere += 1
        self.unwell_since = trio.current_time()

    def end_elsewhere(self) -> None:
        """Note its end."""
        self.elsewhere -= 1
        self.unwell_since = trio.current_time()

    def healed(self) -> None:
        """Note that the lake says that it is healed; counts only while no fault is under way."""
        if not self.hurt:
            self.was_hurt.clear()
            self.lost.clear()

    @property
    def is_owed(self) -> bool:
        """True if the lake has to answer every request now."""
        return not self.elsewhere and len(self.was_hurt) <= self.losses_max

    def may_hurt(self, member: str) -> bool:
        """Return True if a fault of this member leaves the lake able to answer."""
        return len(self.was_hurt | {member}) <= self.losses_max

    def may_lose(self, member: str) -> bool:
        """Return True if content of this member may be lost for ever: the first loss always, more up to m in all.

        What was stored while members were away lies so that it is read when one more goes.
        """
        return not self.lost or len(self.was_hurt | {member}) <= self.losses_max
