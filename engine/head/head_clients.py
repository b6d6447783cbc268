"""State that a head keeps for each client: its connections to the names, and the puts that are in progress.

Names keep leases, watches and names.  Sessions are the head's own: what they hold are answers of members, which are the
head's too, and names look at the generation and epoch of these answers alone.

Rules kept here:
- A session holds the chunks that it was answered as stored, each with its length, all in one gc generation; `epoch` is
  the oldest ring epoch of these answers.  A name is bound only to what a session holds.
- When names do not accept that generation or epoch any more, the session begins anew with a later one: what it held is
  `earlier` then, and is offered again before it is bound.
- Answers of all sessions are bounded, and each user's share of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.head.client_names import AskedNames, ClientNames
from engine.head.names_link import NamesLink
from engine.host.user_shares import Shares
from engine.sessions.references import Client, Session
from lakefs.ids import ChunkId, GcGeneration, MemberId, RingEpoch
from lakefs.wire import messages as m

NOT_BEGUN = GcGeneration(-1)


class HomeLease(NamedTuple):
    """A lease that a head has at a value's home."""

    home: MemberId
    number: int


@dataclass(eq=False)
class HeadClient(Client):
    """A client of a head."""

    link: NamesLink | None = None
    """The link to the names, or to the first shard of them."""
    shards: ClientNames | None = None
    """The links to all names shards, where there may be several."""
    values: dict[int, HomeLease] = field(default_factory=dict)
    """Leases of values at their homes, by the number of the client's lease (`engine.head.head_pins`)."""

    @property
    def names(self) -> AskedNames:
        """The names, as this client asks them."""
        return self.first if self.shards is None else self.shards

    @property
    def first(self) -> NamesLink:
        """The client's link to the names, or to the first shard of them."""
        assert self.link is not None, "a connected client has one"
        return self.link


@dataclass(eq=False)
class HeadSession(Session):
    """A put in progress at a head."""

    generation: GcGeneration = NOT_BEGUN
    epoch: RingEpoch | None = None
    """The oldest ring epoch of the answers; None before the first."""
    chunks: dict[ChunkId, int] = field(default_factory=dict)
    """Lengths of the chunks that were answered as stored in `generation`."""
    earlier: set[ChunkId] = field(default_factory=set)
    """Chunks that were answered in a generation or epoch that names do not accept any more."""
    beginnings: int = 0
    """Number of times that it has begun anew."""
    is_over: bool = False
    shares: Shares | None = None

    @property
    def is_empty(self) -> bool:
        """True if it holds nothing."""
        return not self.chunks and not self.earlier

    def ended(self) -> None:
        """Give back its share of all answers."""
        self.is_over = True
        if self.shares is not None:
            self.shares.give_back(self.user, len(self.chunks) + len(self.earlier))
        self.chunks.clear()
        self.earlier.clear()

    def note(self, shares: Shares, found: Mapping[ChunkId, int], generation: GcGeneration, epoch: RingEpoch) -> None:
        """Hold chunks that were answered as stored.  EngineBusy when there are too many of them."""
        if self.is_over or not found:
            return
        if generation != self.generation:  # it has begun anew since they were asked for
            new = {chunk for chunk in found if chunk not in self.chunks and chunk not in self.earlier}
            self._take(shares, len(new))
            self.earlier |= new
            return
        new = {chunk for chunk in found if chunk not in self.chunks and chunk not in self.earlier}
        self._take(shares, len(new))
        self.earlier.difference_update(found)
        self.chunks.update(found)
        self.epoch = epoch if self.epoch is None else min(self.epoch, epoch)

    def begin_anew(self, generation: GcGeneration) -> None:
        """Go on in this generation: all that it holds is to be offered again."""
        self.earlier.update(self.chunks)
        self.chunks.clear()
        self.generation = generation
        self.epoch = None
        self.beginnings += 1

    def answered(self, epoch: RingEpoch) -> m.Answered:
        """Return when its answers were given; `epoch` if it has none."""
        return m.Answered(self.generation, epoch if self.epoch is None else self.epoch)

    def _take(self, shares: Shares, count: int) -> None:
        if count:
            shares.take(self.user, count)
            self.shares = shares
