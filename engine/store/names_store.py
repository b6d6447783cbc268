"""The part of an open store that names stand on: the metadata, and the connected clients.  It has no segments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trio

from engine.metadata.metadata_store import Metadata
from engine.namespace.watch import Watchers
from engine.sessions.references import References
from engine.store.features import Features
from engine.superblock.superblock import Superblock
from engine.upkeep.index_upkeep import index_state
from lakefs.errors import LakeError
from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX, INFLIGHT_PER_CONNECTION
from lakefs.ports import Clock
from lakefs.version import VERSION, commit
from lakefs.wire.frames import PROTOCOL_VERSION
from lakefs.wire.messages import (
    FEATURE_EACH,
    FEATURE_EXCHANGE,
    FEATURE_PLACES,
    FEATURE_STAMPS,
    FEATURE_TURNS,
    FEATURE_WATCH_ALL,
    HelloReply,
)


@dataclass(kw_only=True)
class NamesStore:
    """The parts of an open store that requests about names use."""

    features: Features
    clock: Clock
    metadata: Metadata
    references: References
    watchers: Watchers
    index_verified: bool = False
    index_looked_at: trio.Event = field(default_factory=trio.Event)
    """Set while no walk through the index runs; then `index_damage` is why the index is not whole, if it is not."""
    index_damage: LakeError | None = None

    @property
    def superblock(self) -> Superblock:
        """The superblock as it is on the disk."""
        return self.features.superblock

    @property
    def read_only_because(self) -> str:
        """The reason why the store takes no writes; empty while it does."""
        return "" if self.metadata.failed is None else self.metadata.failed.message

    @property
    def offered(self) -> int:
        """Features that the reply to a Hello names: FEATURE_ bits of `lakefs.wire.messages`."""
        stamps = FEATURE_STAMPS if self.metadata.stamps is not None else 0
        stamps |= FEATURE_TURNS if self.metadata.turns is not None else 0
        return stamps | FEATURE_PLACES | FEATURE_WATCH_ALL | FEATURE_EACH | FEATURE_EXCHANGE

    def hello(self, *, descriptors: bool) -> HelloReply:
        """Return the reply to a client's Hello.  CoordinatorLost where these names may not answer now."""
        if (check := self.metadata.check_leader) is not None:
            check()
        return HelloReply(
            protocol=PROTOCOL_VERSION,
            server=f"lake {VERSION}",
            store_id=self.superblock.store_id,
            engine_id=self.superblock.engine_id,
            boot_id=self.superblock.boot_id,
            features=self.offered,
            domains=list(self.superblock.domains),
            inflight_max=INFLIGHT_PER_CONNECTION,
            body_bytes_max=BODY_BYTES_MAX,
            batch_max=BATCH_MAX,
            descriptors=descriptors,
            read_only=bool(self.read_only_because),
        )

    async def end_rights(self) -> None:
        """Let heads repeat no stamps any more; returns when none does, within about a second."""
        if self.metadata.turns is not None:
            await self.metadata.turns.end()

    async def status(self) -> dict[str, Any]:
        """Return the state for people and scripts; JSON-able."""
        reason = self.read_only_because
        return {
            "version": VERSION,
            "commit": commit(),
            "store_id": self.superblock.store_id.hex(),
            "engine_id": self.superblock.engine_id.hex(),
            "features": self.features.names(),
            "state": "read-only" if reason else "serving",
            "reason": reason,
            "index_verified": self.index_verified,
            "index": index_state(self),
            "metadata": self.metadata.stats(),
            "clients": self.references.statistics(),
            "gateways": self.references.gateways(),
        }
