"""The leases that an answer gives, for whoever receives one that nobody waits for any more: they are to be closed."""

from __future__ import annotations

from collections.abc import Iterable

from lakefs.wire.messages import KeyedMatched, Message, OpenResult, OpenResults


def given_leases(message: Message) -> list[int]:
    """Return the numbers of the leases that an answer gives, as CloseLeases takes them."""
    if isinstance(message, OpenResults):
        return opened_leases(message.results)
    return list(message.leases) if isinstance(message, KeyedMatched) else []


def opened_leases(results: Iterable[OpenResult]) -> list[int]:
    """Return the numbers of the leases of objects that were opened."""
    return [result.opened.lease for result in results if result.opened is not None and result.opened.lease]
