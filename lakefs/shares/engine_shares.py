"""`EngineShares`: the one owner of all that the engine of a connection shares with a client.

| shared | found by | used by |
|---|---|---|
| stamps | OpenStamps | what is repeated natively (`SharedContent`) |
| shared index | OpenSharedIndex | reads of chunks by id, and what is repeated natively |
| keyed index, or key homes | OpenKeyedIndex, OpenKeyHomes | spaces of keyed blobs |
| segments, slabs | OpenSegments, OpenSlabs | all of these, and reads of granted chunks |
| queue pair (RDMA) | FabricOpen | loads, reads and puts over a network |

Each is found when its first user needs it.  Then these events, each in one order, users before what they use: what is
repeated natively, tables and stamps, queue pair, segments and slabs.

| event | what happens |
|---|---|
| a new connection (`look`) | what was repeated is forgotten; segments and slabs are closed |
| the connection has ended | what was repeated is forgotten at the next look (`SharedContent.standing`) |
| the engine replaced a table | it is requested anew, and used in place of the old one |
| a fork (`begin_anew`) | the child leaves the parent's alone, and begins with nothing |
| the client is closed (`close`) | all is closed, once |

Tables, queue pairs and stamps have the number of their connection, the epoch, and are used on no other, also before
`look` was called.  What cannot be opened is no error: the client works by requests.

A client starts sooner without most of this, so the modules are imported at first use.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from lakefs.grants.descriptors import DESCRIPTORS_MAX, SegmentDescriptors
from lakefs.host.forks import NO_FORK
from lakefs.ids import SegmentId

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric
    from lakefs.shares.index_in_use import IndexInUse
    from lakefs.shares.keys_in_use import KeysInUse
    from lakefs.shares.share import Connected, Share
    from lakefs.shares.shared_content import NativeTable, SharedContent
    from lakefs.shares.stamps_in_use import StampsInUse


class EngineShares:
    """All that one client's engine shares with it.  Used as its client is: by threads, or by tasks of one loop."""

    _index: IndexInUse | None = None
    _keys: KeysInUse | None = None
    _stamps: StampsInUse | None = None

    def __init__(self, client: Connected, epoch: int, fabric: ClientFabric | None = None) -> None:
        """`epoch`: that of the client now.  `fabric`: RDMA to the engine, closed with this."""
        self._client = client
        self.epoch = epoch
        """The connection that segments and slabs are of."""
        self.descriptors = SegmentDescriptors()
        """Segments and slabs."""
        self.fabric = fabric
        self._is_closed = False
        self._contents: list[SharedContent] = []
        self._asked: set[tuple[int, SegmentId]] = set()
        """(Epoch, segment) of descriptors that were requested: once for each connection is enough."""
        self._asked_slabs: set[tuple[int, int]] = set()
        """(Epoch, slab), likewise."""

    # --- found ---------------------------------------------------------------------------------------------------

    @property
    def index(self) -> IndexInUse:
        """The shared index, and reads of chunks through it."""
        with NO_FORK:
            if self._index is None:
                self._index = cast("IndexInUse", self._made("index_in_use", "IndexInUse"))
            return self._index

    @property
    def keys(self) -> KeysInUse:
        """The keyed index, and reads of keyed blobs through it."""
        with NO_FORK:
            if self._keys is None:
                self._keys = cast("KeysInUse", self._made("keys_in_use", "KeysInUse"))
            return self._keys

    @property
    def stamps(self) -> StampsInUse:
        """The stamps of names."""
        with NO_FORK:
            if self._stamps is None:
                self._stamps = cast("StampsInUse", self._made("stamps_in_use", "StampsInUse"))
            return self._stamps

    def content_for(self, table: NativeTable) -> SharedContent:
        """Return what keeps a native table in step with what the engine shares; it is closed with this."""
        with NO_FORK:
            content = cast(
                "SharedContent", self._made("shared_content", "SharedContent", self.stamps, self.index, table)
            )
            self._contents.append(content)
            return content

    def _made(self, module: str, name: str, *args: object) -> Any:
        return getattr(import_module(f"lakefs.shares.{module}"), name)(self._client, *args)

    def not_asked(self, segments: set[SegmentId]) -> list[SegmentId]:
        """Return those of which no descriptor is held and none was requested here, to be requested now.

        None where the engine gives none: what lies in a segment is then asked for.
        """
        offers = self._client.steps.offers
        if not (offers.segments or offers.key_homes):  # the segments of key homes are members'
            return []
        epoch = self._client.epoch
        new = [segment for segment in self.descriptors.missing(segments) if (epoch, segment) not in self._asked]
        if len(self._asked) + len(new) > DESCRIPTORS_MAX:
            self._asked.clear()
        self._asked.update((epoch, segment) for segment in new)
        return new

    def slabs_not_asked(self, slabs: set[int]) -> list[int]:
        """Like `not_asked`, of slabs of the DRAM tier."""
        if not slabs or not self._client.steps.offers.slabs:
            return []
        epoch = self._client.epoch
        new = [slab for slab in self.descriptors.slabs.missing(slabs) if (epoch, slab) not in self._asked_slabs]
        if len(self._asked_slabs) + len(new) > DESCRIPTORS_MAX:
            self._asked_slabs.clear()
        self._asked_slabs.update((epoch, slab) for slab in new)
        return new

    # --- renewed, forgotten, closed ------------------------------------------------------------------------------

    def look(self) -> None:
        """Begin a new epoch: the new connection may be to another store, with segments of the same numbers."""
        for content in self._contents:
            content.standing()
        self.descriptors.close()
        self.epoch = self._client.epoch

    def begin_anew(self, engine: object) -> None:
        """In a child just forked, whose client of the engine is this one; see `lakefs.host.forks`."""
        for content in self._contents:
            content.begin_anew()
        for share in self._found():
            share.forget()
        if self.fabric is not None:
            self.fabric = self.fabric.forked(engine)
        before, self.descriptors = self.descriptors, SegmentDescriptors()
        before.leave_all()

    def close(self) -> None:
        """Close all; a second call does nothing.  Blocks if there is a fabric."""
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as stack:  # what is pushed last is closed first; each is, even if another fails
            stack.callback(self.descriptors.close)
            if self.fabric is not None:
                stack.callback(self.fabric.close)
            for share in reversed(self._found()):
                stack.callback(share.forget)
            for content in self._contents:
                stack.callback(content.close)

    def _found(self) -> list[Share[Any]]:
        return [share for share in (self._keys, self._index, self._stamps) if share is not None]
