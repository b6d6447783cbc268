"""Figures of a head's clients, and of all heads of a machine together: each knows only the clients that it accepted.

Rules kept here:
- Figures of other heads are some seconds old, and missing for one that has begun just now.
- Names count leases of all heads' clients by themselves; heads have some of their own beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from engine.sessions.references import References
from lakefs.limits import GATEWAYS_LISTED_MAX

HEAD_GATEWAYS_MAX: Final = 128
"""Gateways that a head says to the others: notes of 1.5 KB at most as JSON, 0.2 MB."""
Figures = dict[str, Any]
OTHER_HEADS: Final = "other_heads"
"""The key of what a machine says: figures of the other heads, each with the id of its process."""


def figures_of(references: References) -> Figures:
    """Return the counts of a head's clients, and the gateways among them; JSON-able."""
    return {"clients": references.statistics(), "gateways": references.gateways()[:HEAD_GATEWAYS_MAX]}


def with_others(clients: dict[str, int], others: Sequence[Figures]) -> dict[str, int]:
    """Return the counts of a head's clients with those of the others."""
    return {name: count + sum(other["clients"].get(name, 0) for other in others) for name, count in clients.items()}


def gateways_with(gateways: list[dict[str, Any]], others: Sequence[Figures]) -> list[dict[str, Any]]:
    """Return the gateways of a head with those of the others, in the order of one engine's."""
    found = gateways + [gateway for other in others for gateway in other["gateways"]]
    return sorted(found, key=lambda gateway: (gateway["url"], gateway["process"]))[:GATEWAYS_LISTED_MAX]
