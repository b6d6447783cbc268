"""A bound that users share, so that none of them takes what all others need.

Users are told apart by the uid that the kernel gives for a Unix socket's peer.  Root and the engine's own user are one:
gateways and mounts run as either.  Everybody who is let in over TCP is one: all of them hold the same token, and one
machine may have many addresses.

Rules kept here:
- One user has at most a quarter of all; root and the engine's own user may have more quarters.
- All others together leave a quarter to root and the engine's own user.
"""

from __future__ import annotations

import os
from typing import Final

from lakefs.errors import EngineBusy

OWN: Final = "root and the engine's own user"
_OVER_TCP: Final = "all clients over TCP"


def user_of(uid: int | None) -> str:
    """The user that a client counts as, in words; None: it came over TCP."""
    if uid is None:
        return _OVER_TCP
    return OWN if uid in (0, os.geteuid()) else f"user {uid}"


class Shares:
    """At most `most` of something, which `noun` names in the plural: "puts in progress"."""

    def __init__(self, most: int, noun: str, *, own_quarters: int = 1) -> None:
        self.most = most
        self._noun = noun
        self._quarter = -(-most // 4)
        self._own_most = min(own_quarters * self._quarter, most)
        self.users: dict[str, int] = {}
        """How many each user has, of those that have any."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def take(self, user: str) -> None:
        """One more for the user.  EngineBusy, naming the bound that is met."""
        used = self.users.get(user, 0)
        if used >= (self._own_most if user == OWN else self._quarter):
            raise self._refusal(used, f"{user}, the most that one user may have")
        if self._count >= self.most:
            raise self._refusal(self._count, "all users together, the most that there may be")
        if user != OWN:
            others = self._count - self.users.get(OWN, 0)
            if others >= max(1, self.most - self._quarter):
                raise self._refusal(others, "all users but root and the engine's own, the most they may have")
        self.users[user] = used + 1
        self._count += 1

    def give_back(self, user: str, count: int = 1) -> None:
        """The user has so many less."""
        self._count -= count
        self.users[user] -= count
        if not self.users[user]:
            del self.users[user]

    def _refusal(self, count: int, whose: str) -> EngineBusy:
        return EngineBusy(
            f"the engine has {count} {self._noun} already, of {whose}; try again when some have ended"
        )
