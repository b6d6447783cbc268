"""Repeats what was asked by a table that is not the newest any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from engine.members.ports import Members
from lakefs.cluster.table import Table
from lakefs.errors import StaleEpoch
from lakefs.limits import STRIPE_ATTEMPTS_MAX

T = TypeVar("T")


async def by_newest_table(members: Members, ask: Callable[[Table], Awaitable[T]]) -> T:
    """Return the outcome of `ask` by the newest table; it is called anew when a member knows a newer one.

    StaleEpoch when tables change again and again.
    """
    for _ in range(STRIPE_ATTEMPTS_MAX - 1):
        try:
            return await ask(members.tables[0])
        except StaleEpoch:
            continue
    return await ask(members.tables[0])
