"""A bound that users share, so that no user takes the share that all others need.

Users are distinguished by the uid that the kernel gives for a Unix socket's peer.  Root and the engine's own user count
as one: gateways and mounts run as either.  All clients over TCP count as one: they hold the same token, and one machine
may have many addresses.

Rules kept here:
- One user has at most a quarter of the bound; root and the engine's own user may have more quarters.
- All other users together leave a quarter to root and the engine's own user.
"""

from __future__ import annotations

import os
from typing import Final

from lakefs.errors import EngineBusy

OWN: Final = "root and the engine's own user"
_OVER_TCP: Final = "all clients over TCP"


def user_of(uid: int | None) -> str:
    """Return the user, in words, as which a client with that uid counts; a client over TCP has None."""
    if uid is None:
        return _OVER_TCP
    return OWN if uid in (0, os.geteuid()) else f"user {uid}"


class Shares:
    """At most `most` things, which `noun` names in the plural: "puts in progress"."""

    def __init__(self, most: int, noun: str, *, own_quarters: int = 1) -> None:
        self.most = most
        self._noun = noun
        self._quarter = -(-most // 4)
        self._own_most = min(own_quarters * self._quarter, most)
        self.users: dict[str, int] = {}
        """Number that each user has, for users that have any."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def take(self, user: str, count: int = 1) -> None:
        """Give the user one more, or so many.  EngineBusy, naming the bound that is reached."""
        used = self.users.get(user, 0)
        if used + count > (self._own_most if user == OWN else self._quarter):
            raise self._refusal(used, f"{user}, the most that one user may have")
        if self._count + count > self.most:
            raise self._refusal(self._count, "all users together, the most that there may be")
        if user != OWN:
            others = self._count - self.users.get(OWN, 0)
            if others + count > max(1, self.most - self._quarter):
                raise self._refusal(others, "all users but root and the engine's own, the most they may have")
        self.users[user] = used + count
        self._count += count
        assert self._count <= self.most, "no more are given out than there are"

    def give_back(self, user: str, count: int = 1) -> None:
        """Take `count` back from the user."""
        assert self.users.get(user, 0) >= count, "a user gives back what it was given"
        self._count -= count
        self.users[user] -= count
        if not self.users[user]:
            del self.users[user]

    def _refusal(self, count: int, whose: str) -> EngineBusy:
        return EngineBusy(f"the engine has {count} {self._noun} already, of {whose}; try again when some have ended")
