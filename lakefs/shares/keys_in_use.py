"""The keyed index in use: the look-ups and reads through it, and the notes of the keys that were used so.

A head has no keyed index.  It shares those of the members on its machine, and which of them is the home of each key
(`lakefs.direct.key_homes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lakefs.direct.key_homes import KeyHomesReader
from lakefs.direct.keyed_reads import KeyedReads
from lakefs.direct.read_notes import KeyNotes
from lakefs.grants import batch_plan
from lakefs.shared_index import keyed_index
from lakefs.shared_index.keyed_index import KeyedIndexReader
from lakefs.shares.share import Share, opened, opened_of
from lakefs.stamps import stamps
from lakefs.steps.steps import Steps
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import KeyHomesOpened, NoteReads, OpenKeyedIndex, OpenKeyHomes

_SPACES_NOTED: Final = 64
"""Most spaces of whose keys notes are kept."""


class KeysInUse(Share[KeyedReads]):
    """The keyed index of one connection, and the reads by it."""

    def forget(self) -> None:
        """Drop the index and the notes."""
        super().forget()
        self._notes: dict[int, KeyNotes] = {}

    def note(self, space: int, keys: Sequence[bytes]) -> None:
        """Note keys of a space that were used without a request; tell the engine of them now and then."""
        notes = self._notes.get(space)
        if notes is None:
            if len(self._notes) >= _SPACES_NOTED:
                self._notes.clear()
            notes = self._notes[space] = KeyNotes()
        if notes.note(keys):
            self.tell(space)

    def tell(self, space: int) -> None:
        """Tell the engine of the keys noted by now.  Before a put: what that evicts depends on them."""
        notes = self._notes.get(space)
        if notes is not None and (keys := notes.take()):
            self._client.tell(NoteReads([], space, keys))

    @property
    def _is_offered(self) -> bool:
        offers = self._client.steps.offers
        return offers.keyed_index or offers.key_homes

    def _opened(self, epoch: int) -> Steps[KeyedReads | None]:
        if not (keyed_index.IS_BUILT and batch_plan.IS_BUILT and stamps.IS_BUILT):
            return None
        index: KeyedIndexReader | KeyHomesReader
        if self._client.steps.offers.key_homes:
            index = yield from opened_of(OpenKeyHomes(), _key_homes)
        else:
            index = yield from opened(OpenKeyedIndex(), KeyedIndexReader)
        steps = self._client.steps
        return KeyedReads(index, steps.descriptors, steps.check, lambda: self._client.is_held(epoch))

    def _is_current(self, found: KeyedReads) -> bool:
        return found.index.is_current


def _key_homes(reply: Reply) -> KeyHomesReader:
    assert isinstance(reply.message, KeyHomesOpened), "the answer to OpenKeyHomes"
    return KeyHomesReader(reply.descriptors, reply.message.numbers)
