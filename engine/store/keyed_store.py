"""The part of an open store that spaces and keys stand on: that of names, and the keyed blobs.  It has no segments."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.chunks.quarantine import Quarantine
from engine.keyed.keyed_blobs import KeyedBlobs
from engine.store.names_store import NamesStore
from engine.tiers.keyed_index import KeyedIndex


@dataclass(kw_only=True)
class KeyedStore(NamesStore):
    """The parts of an open store that requests about spaces and keys use."""

    quarantine: Quarantine
    keyed_index: KeyedIndex | None = None
    keyed: KeyedBlobs = field(init=False)

    def __post_init__(self) -> None:
        self.keyed = KeyedBlobs(self.metadata, self.quarantine, self.clock)
