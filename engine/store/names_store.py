"""The part of an open store that names stand on: the metadata, and who is connected.  It has no segments."""

from __future__ import annotations

from dataclasses import dataclass

from engine.metadata.metadata_store import Metadata
from engine.namespace.watch import Watchers
from engine.sessions.references import References
from engine.store.features import Features
from lakefs.ports import Clock


@dataclass
class NamesStore:
    """The parts of an open store that requests about names use."""

    features: Features
    clock: Clock
    metadata: Metadata
    references: References
    watchers: Watchers
