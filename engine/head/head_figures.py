"""Figures of a head's clients, and of all heads of a machine together: each knows only the clients that it accepted.

Beside them those of the names shards behind the first, each asked for its own.

Rules kept here:
- Figures of other heads are some seconds old, and missing for one that has begun just now.
- Names count leases of all heads' clients by themselves; heads have some of their own beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from engine.head.client_names import ClientNames
from engine.host.tasks import run_all
from engine.sessions.references import References
from lakefs.errors import LakeError
from lakefs.ids import NamesShard
from lakefs.limits import GATEWAYS_LISTED_MAX
from lakefs.wire import messages as m

HEAD_GATEWAYS_MAX: Final = 128
"""Gateways that a head says to the others: notes of 1.5 KB at most as JSON, 0.2 MB."""
Figures = dict[str, Any]
_OF_A_SHARD: Final = "state", "reason", "metadata", "clients", "index", "disk"
"""Parts of a status that are a names shard's own."""
OTHER_HEADS: Final = "other_heads"
"""The key of what a machine says: figures of the other heads, each with the id of its process."""


def figures_of(references: References) -> Figures:
    """Return the counts of a head's clients, and the gateways among them; JSON-able."""
    return {"clients": references.statistics(), "gateways": references.gateways()[:HEAD_GATEWAYS_MAX]}


async def figures_of_shards(names: ClientNames | None) -> list[Figures]:
    """Return what each names shard but the first says of itself; JSON-able.  One that cannot be reached says why."""
    shards = [] if names is None else list(map(NamesShard, range(1, names.shards.count)))
    found: dict[NamesShard, Figures] = {}

    async def ask(shard: NamesShard) -> None:
        assert names is not None, "it has shards"
        try:
            answer = await names.link(shard).ask(m.Status(), m.StatusReply)
        except LakeError as error:
            found[shard] = {"shard": shard, "unreachable": error.message}
            return
        said: Figures = json.loads(answer.status_json)
        found[shard] = {"shard": shard, **{name: said[name] for name in _OF_A_SHARD if name in said}}

    await run_all(ask, shards)
    return [found[shard] for shard in shards]


def leases_of(statuses: Iterable[Figures]) -> int:
    """Return the leases that names keep, as all shards count them that could be asked."""
    return sum(status["clients"]["leases"] for status in statuses if "clients" in status)


def with_others(clients: dict[str, int], others: Sequence[Figures]) -> dict[str, int]:
    """Return the counts of a head's clients with those of the others."""
    return {name: count + sum(other["clients"].get(name, 0) for other in others) for name, count in clients.items()}


def gateways_with(gateways: list[dict[str, Any]], others: Sequence[Figures]) -> list[dict[str, Any]]:
    """Return the gateways of a head with those of the others, in the order of one engine's."""
    found = gateways + [gateway for other in others for gateway in other["gateways"]]
    return sorted(found, key=lambda gateway: (gateway["url"], gateway["process"]))[:GATEWAYS_LISTED_MAX]
