"""`KnownNames`: what a client has learned about names, repeated without a request while it stands.

    get, stat, open of a name     ->  known, stamps stand, content at hand and right?  then it is the answer
                                      else the steps of `LakeSteps`, whose answer is learned

Each method returns the answer, or the steps that get it; `lakefs.client.facade` runs those.

Rules kept here:
- An answer is learned with the stamps of every record that it was read from.  It is durable: it has been given.  (A
  mount, which promises less, also has answers learned that are visible and may not be durable.)
- It belongs to the connection on which it was read.  Each call first looks if that connection is still open (the
  blocking client asks the system at most once in a millisecond, in which no engine starts), and forgets everything,
  before it answers, if it is not.  Beside that each look at stamps reads the robust mutex, which says if the engine
  lives.
- The whole answer of one call was true at one instant of the call: that at which its first name was looked up.  Where a
  part had to be asked for, the rest must still stand when that has arrived; else all is asked for.
- Content is copied at once, and checked: by CRC32C always, and by BLAKE3 if the client checks so.  Only content of one
  chunk of at most 256 KiB is known.
- An object of at most 64 KiB that is opened is copied whole, so it needs no lease; longer ones are opened as ever.
- An error is never learned.
- Any thread may call.  Each native call is one step under the interpreter's lock; `content.lock` guards what is shared
  by the engine, and what is learned, against a connection that ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from lakefs.content.verify import Check
from lakefs.get.opened import Learned, Opened, Piece
from lakefs.host.writable_memory import WritableBuffer, writable_memory
from lakefs.ids import ChunkId, ChunkKind, data_chunk_id
from lakefs.known.counts import KnownCounts
from lakefs.lake.uploads import Progress
from lakefs.limits import KNOWN_NAMES_BYTES
from lakefs.names import parse_object_name
from lakefs.shares.share import NEVER, Connected
from lakefs.stamps import stamps as shared_stamps
from lakefs.steps.steps import Steps
from lakefs.wire.messages import ObjectStat

if TYPE_CHECKING:
    from lakefs.known._known import KnownTable as KnownTable
    from lakefs.shares.engine_shares import EngineShares

    IS_BUILT: bool
else:
    try:
        from lakefs.known._known import KnownTable
    except ImportError:
        KnownTable = None
    IS_BUILT = KnownTable is not None and shared_stamps.IS_BUILT

T = TypeVar("T")
_DATA: Final = bytes([ChunkKind.DATA])
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack_stat: Final = msgspec.msgpack.Decoder(ObjectStat).decode
_Found = list[tuple[T, bytes, int] | None]
"""Content (or its length), chunk and serial of each name; None: not answered here."""
_ROOM_BYTES: Final = 1 << 20
"""Bytes that are read by one native call, for which other threads wait: 0.3 ms."""


class Client(Connected, Protocol):
    """The part of a client that `KnownNames` uses."""

    shares: EngineShares


class KnownNames:
    """The names that one client knows, and the steps of all others."""

    def __init__(self, client: Client, *, is_patient: bool) -> None:
        """`is_patient`: no event loop waits for a call, so it may read any number of bytes."""
        self._client = client
        self._is_patient = is_patient
        self._table: Final = KnownTable(KNOWN_NAMES_BYTES)
        self.content: Final = client.shares.content_for(self._table)
        """All that the engine shares by which names are answered.  The driver runs `renewal` when that is due."""
        self._index: Final = client.shares.index
        self._is_hashed: Final = client.steps.check is Check.BLAKE3

    @property
    def counts(self) -> KnownCounts:
        """Counts of what is known, and of what was answered."""
        return KnownCounts(*self._table.counts)

    # --- answering ---------------------------------------------------------------------------------------------------

    def stand(self, stamps: bytes, epoch: int) -> bool:
        """Return True if an answer of the connection `epoch` still stands: none of its stamps has turned."""
        reader = self.content.stamps
        return epoch == self.content.standing() != NEVER and reader is not None and reader.stand(stamps)

    def stat(self, name: str) -> ObjectStat | Steps[ObjectStat]:
        """See `LakeSteps.stat`."""
        found = self.stat_at_hand(name)
        return self._client.steps.stat(name) if found is None else found

    def stat_at_hand(self, name: str) -> ObjectStat | None:
        """Return the stat of a name as it is now; None if it has to be asked for."""
        packed = self._table.stat(name) if self.content.standing() != NEVER else None
        if packed is None:
            return None
        self._table.count(1)
        return _unpack_stat(packed)

    def exists(self, name: str) -> bool | Steps[bool]:
        """See `LakeSteps.exists`."""
        if self.content.standing() == NEVER or self._table.stat(name) is None:
            return self._client.steps.exists(name)
        self._table.count(1)
        return True

    def get(self, name: str, *, progress: Progress | None = None) -> bytes | Steps[bytes]:
        """See `LakeSteps.get`."""
        found = self._table.read(name) if self.content.standing() != NEVER else None
        if found is None or not self._is_right(*found):
            return self._client.steps.get(name, progress=progress)
        content, chunk = found
        self._answered([chunk])
        if progress is not None:
            progress(len(content), 0)
        return content

    def open(self, name: str) -> Opened | Steps[Opened]:
        """See `LakeSteps.open`."""
        return self.open_at_hand(name) or self._client.steps.open(name)

    def open_at_hand(self, name: str) -> Opened | None:
        """Return an object of at most 64 KiB as it is now, with its content; None if it has to be asked for."""
        epoch = self.content.standing()
        found = self._table.read(name, True) if epoch != NEVER else None
        if found is None or not self._is_right(*found[:2]):
            return None
        content, chunk, stat = found
        self._answered([chunk])
        pieces = [Piece(ChunkId(chunk), 0, len(content))] if content else []
        inline = {ChunkId(chunk): content} if content else {}
        return Opened(parse_object_name(name), _unpack_stat(stat), 0, pieces, {}, inline, epoch)

    def get_many(self, names: Sequence[str]) -> list[bytes] | Steps[list[bytes]]:
        """See `LakeSteps.get_many`."""
        epoch, asked = self.content.standing(), list(names)
        if epoch == NEVER or not asked:
            return self._client.steps.get_many(names)
        found: _Found[bytes] = []
        is_one = self._read_many(asked, found, None)
        if self._is_hashed:
            found = [read if read and data_chunk_id(read[0]) == read[1] else None for read in found]
        if None in found or not (is_one or self._still_stand(epoch, asked, found)):
            return self._rest_of_many(epoch, asked, found)
        return self._answer(found)

    def _rest_of_many(self, epoch: int, names: list[str], found: _Found[bytes]) -> Steps[list[bytes]]:
        """Ask for the names that were not found, and then, if something has changed meanwhile, for all."""
        missing = [name for name, read in zip(names, found, strict=True) if read is None]
        arrived = yield from self._client.steps.get_many(missing)
        if len(missing) < len(names) and not self._still_stand(epoch, names, found):
            return (yield from self._client.steps.get_many(names))
        return self._answer(found, arrived)

    def get_into(self, name: str, buffer: WritableBuffer) -> int | Steps[int]:
        """See `LakeSteps.get_into`."""
        sizes = self.get_many_into([name], [buffer])
        return sizes[0] if isinstance(sizes, list) else _only(sizes)

    def get_many_into(self, names: Sequence[str], buffers: Sequence[WritableBuffer]) -> list[int] | Steps[list[int]]:
        """See `LakeSteps.get_many_into`."""
        epoch, asked = self.content.standing(), list(names)
        if epoch == NEVER or not asked or len(asked) != len(buffers):
            return self._client.steps.get_many_into(names, buffers)
        targets = [writable_memory(buffer, name) for name, buffer in zip(asked, buffers, strict=True)]
        found: _Found[int] = []
        is_one = self._read_many(asked, found, targets)
        for at, read in enumerate(found if self._is_hashed else ()):
            if read is not None and data_chunk_id(targets[at][: read[0]]) != read[1]:
                found[at] = None
        if None in found or not (is_one or self._still_stand(epoch, asked, found)):
            return self._rest_into(epoch, asked, targets, found)
        return self._answer(found)

    def _rest_into(
        self, epoch: int, names: list[str], targets: list[memoryview], found: _Found[int]
    ) -> Steps[list[int]]:
        """Do `_rest_of_many` for memory of the caller."""
        missing = [at for at, read in enumerate(found) if read is None]
        steps = self._client.steps
        arrived = yield from steps.get_many_into([names[at] for at in missing], [targets[at] for at in missing])
        if len(missing) < len(names) and not self._still_stand(epoch, names, found):
            return (yield from steps.get_many_into(names, targets))
        return self._answer(found, arrived)

    def _answer(self, found: _Found[T], arrived: Sequence[T] = ()) -> list[T]:
        """Return what was found, and between it what has arrived."""
        self._answered([read[1] for read in found if read is not None])
        rest = iter(arrived)
        return [next(rest) if read is None else read[0] for read in found]

    def _read_many(self, names: list[str], found: _Found[Any], targets: list[memoryview] | None) -> bool:
        """Read what is at hand; return True if that was one step.

        An event loop does not wait for more than it waits for any read.
        """
        room = _ROOM_BYTES if self._is_patient else self._client.steps.at_once_bytes
        self._table.read_many(names, found, room, targets)
        is_one = len(found) == len(names)
        if not self._is_patient:
            found += [None] * (len(names) - len(found))
        while len(found) < len(names):
            self._table.read_many(names, found, room, targets)
        return is_one or not self._is_patient

    def _still_stand(self, epoch: int, names: list[str], found: _Found[Any]) -> bool:
        """Return True if what was found on a connection is true now, and so has been since then."""
        return self.content.epoch == epoch == self._client.epoch and self._table.stand(names, found)

    def _is_right(self, content: bytes | memoryview, chunk: bytes) -> bool:
        """Return True unless the client checks by BLAKE3, and these are other bytes."""
        return not self._is_hashed or data_chunk_id(content) == chunk

    def _answered(self, chunks: Sequence[bytes]) -> None:
        """Count names that were answered, and note their chunks for the engine's DRAM tier."""
        self._table.count(len(chunks))
        if self._index.notes.note_many(chunks):
            self._index.tell_notes()

    # --- learning ----------------------------------------------------------------------------------------------------

    @property
    def wants_stamps(self) -> bool:
        """True if answers can be learned: the engine of this connection has stamps."""
        return self.content.epoch != NEVER and self.content.epoch == self._client.epoch

    def learn(self, answers: Sequence[Learned], epoch: int, *, is_opened: bool) -> None:
        """See `Learner.learn`."""
        content = self.content
        if epoch != content.epoch:
            return
        parts = [
            (f"{bucket}/{key}", stamps, _pack(stat), _chunk_of(stat) if is_opened else None, stat.size_bytes)
            for (bucket, key), stat, stamps in answers
            if stamps
        ]
        with content.lock:
            if epoch == content.epoch:
                content.want(*self._table.learn(parts))


def _chunk_of(stat: ObjectStat) -> bytes | None:
    """Return the chunk that is the whole content of an opened object; None if a manifest lists its chunks."""
    return stat.blob if stat.blob[:1] == _DATA else None


def _only(sizes: Steps[list[int]]) -> Steps[int]:
    return (yield from sizes)[0]
