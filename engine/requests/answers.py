"""Parts that handlers share: reads of metadata and decisions, results of a batch's items, grants.

`Decisions` runs a request's read (`look`) or decision (`change`) on one view or transaction, then waits until the state
that it saw is durable, before a refusal too.  With `durable` false it does not wait.
`PackedLocated` is the reply to Locate with its grants already encoded, as the shared index's table packs them: the
bytes sent are those of `Located`, and the grants never become Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from engine.format.layouts import ChunkRecord
from engine.metadata.metadata_store import Metadata
from engine.namespace.tree import ChangedBy
from engine.requests.folder_changes import FolderChanges
from engine.sessions.references import Client
from engine.tables.views import Transaction, View
from engine.tiers.shared_index import NO_GRANT
from lakefs.errors import InvalidArgument, LakeError, UserError
from lakefs.ids import ChunkId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from lakefs.wire.media import MEDIUM_INLINE, MEDIUM_SEGMENT

T = TypeVar("T")
NamesRequest = (
    m.Commit
    | m.BindBlobs
    | m.PutObjects
    | m.DeleteNames
    | m.Rename
    | m.Exchange
    | m.MakeFolder
    | m.MakeSymlink
    | m.RemoveFolder
    | m.SetAttributes
)
"""The requests that change names, and tell what became of their folders when asked (`folders`)."""
_decode_grants: Final = msgspec.msgpack.Decoder(list[m.Grant]).decode


class Decisions:
    """Looks and decisions on one store's metadata.  A look's refusal waits for durability too."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    async def look(self, look: Callable[[View], T], durable: bool = True, *, stamps_for: Client | None = None) -> T:
        """Return what `look` finds on a view of now: once that state is durable, or at once without `durable`.

        `stamps_for`: the view is a `RecordedView`, if there are stamps for this client.
        """
        metadata = self._metadata
        refusal: UserError | None = None
        with (
            metadata.view()
            if stamps_for is None
            else metadata.recorded_view(stamps_for.stamps_of, durable=durable) as view
        ):
            try:
                found = look(view)
            except UserError as error:
                refusal = error
            sequence = view.sequence
        if durable:
            await metadata.wait_durable(sequence)
        else:
            await metadata.wait_visible()
        if refusal is not None:
            raise refusal
        return found

    async def change(
        self, client: Client, decide: Callable[[Transaction], T], durable: bool = True, *, grows: bool = True
    ) -> T:
        """Run `decide` for a client; durable on return, or with `durable` false visible.

        `grows` false: the change adds nothing that stays, and is accepted even when the disk is full.
        """

        def decide_for_client(txn: Transaction) -> T:
            txn.note(ChangedBy(client))
            return decide(txn)

        result, sequence = await self._metadata.commit(decide_for_client, durable=durable, grows=grows)
        await (self._metadata.wait_durable(sequence) if durable else self._metadata.wait_visible())
        return result

    async def change_names(
        self,
        client: Client,
        names: Sequence[tuple[str, str]],
        decide: Callable[[Transaction], list[m.NameResult]],
        request: NamesRequest,
        *,
        conditions: Sequence[m.Condition] = (),
        grows: bool = True,
    ) -> list[m.NameResult]:
        """Like `change`, of names: a result for each, with what became of its folder if the request asks for it.

        `conditions`: those that `decide` checks of the names, or none.  Names behind those that `decide` has results of
        get empty ones, for their folders.
        """
        told: FolderChanges | None = None

        def decide_for_client(txn: Transaction) -> list[m.NameResult]:
            nonlocal told
            told = FolderChanges(txn, names, conditions) if request.folders else None
            txn.note(ChangedBy(client))
            results = decide(txn)
            if told is not None:
                told.decided(txn)
            return results

        results, sequence = await self._metadata.commit(decide_for_client, durable=request.durable, grows=grows)
        results = [*results, *[m.NameResult()] * (len(names) - len(results))]
        if told is not None:  # no checkpoint since the decision
            results = told.told(self._metadata.stamps_of(client.stamps_of, durable=request.durable), results)
        await (self._metadata.wait_durable(sequence) if request.durable else self._metadata.wait_visible())
        return results


def failed(error: LakeError) -> m.NameResult:
    """Return the result of a batch's item that failed."""
    return m.NameResult(failure=failure_of(error))


def failure_of(error: LakeError) -> m.Failure:
    """Return an error as a message."""
    return m.Failure(error.wire_code, error.message, error.subject)


def versions_of(request: m.StatNames | m.OpenObjects | m.DeleteNames) -> Sequence[str]:
    """Return the version wanted of each name, "" for none.  InvalidArgument when the counts differ."""
    if len(request.versions) not in (0, len(request.names)):
        raise InvalidArgument(f"{len(request.versions)} versions for {len(request.names)} names")
    return request.versions or [""] * len(request.names)


def stored(results: list[tuple[ChunkId, bool]]) -> Reply:
    """Return the reply to a request that stores chunks."""
    return Reply(m.Stored([chunk for chunk, _ in results], [fresh for _, fresh in results]))


def grant_of(record: ChunkRecord | None) -> m.Grant:
    """Return the read grant for a chunk's record; one of MEDIUM_NONE when there is no record."""
    if record is None:
        return NO_GRANT
    return m.Grant(
        MEDIUM_SEGMENT,
        record.segment,
        record.offset,
        record.stored_bytes,
        record.logical_bytes,
        0,
        record.crc,
        record.birth,
    )


def inline_grant(record: ChunkRecord, offset: int, length: int) -> m.Grant:
    """Return the grant for a payload in the reply's body, `length` bytes from `offset`."""
    return m.Grant(MEDIUM_INLINE, 0, offset, length, length, 0, record.crc, 0)


class PackedLocated(m.Message, frozen=True):
    """`Located`, already encoded, for a client that gets bytes."""

    grants: msgspec.Raw

    def unpacked(self) -> m.Located:
        """Return the `Located` for a client in this process."""
        return m.Located(_decode_grants(self.grants))
