"""The leases that an answer gives, for whoever receives one that nobody waits for any more: they are to be closed."""

from __future__ import annotations

from lakefs.wire.messages import KeyedMatched, Message, OpenResults


def given_leases(message: Message) -> list[int]:
    """Return the numbers of the leases that an answer gives, as CloseLeases takes them."""
    if isinstance(message, OpenResults):
        opened = [result.opened.lease for result in message.results if result.opened is not None]
        return [lease for lease in opened if lease]
    return list(message.leases) if isinstance(message, KeyedMatched) else []
