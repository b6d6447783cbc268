"""The witness: sits between a server and the engine's service and compares every answer with the model.

A decision is seen in the step in which it happens (`metadata.commit` returns in the step in which it decided), so the
order of decisions is known, and the model gets the same request at the same moment.  Answers to reads are compared with
every state that was current between request and answer.  What has been answered must survive every crash.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import msgspec

from engine.format.layouts import EtagKind, NodeKind
from engine.namespace.buckets import find_bucket
from engine.namespace.keys import lookup_path
from engine.namespace.names import resolve
from engine.namespace.object_stat import etag_of
from engine.namespace.tree import Resolved
from engine.namespace.version_keys import group_of
from engine.namespace.versions import node_of, old_versions
from engine.store.store import Store
from engine.tables.views import Transaction, View
from engine.uploads.lifecycle import whole_etag
from lakefs.content.manifest import derived_etag
from lakefs.errors import InvalidArgument, LakeError, UploadNotFound, UserError, VersionIsMarker
from lakefs.ids import BlobId, Sequence as GroupSequence, data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, EngineService, Reply, ServedClient
from tests.sim.judges.history import History, SimFailure
from tests.sim.judges.model import NO_BUCKETS, Model, look_open, look_up, look_up_version, page_of
from tests.sim.judges.repeater import Repeater
from tests.sim.judges.state import MARK, NO_BLOB, Answer, Bound, State
from tests.sim.judges.upload_model import parts_of, removed_uploads
from tests.sim.judges.version_model import fill, listed, old_of
from tests.sim.world.contents import Contents

T = TypeVar("T")
_CHANGES = (
    m.PutObjects,
    m.Commit,
    m.DeleteNames,
    m.Rename,
    m.Copy,
    m.MakeFolder,
    m.RemoveFolder,
    m.MakeSymlink,
    m.SetAttributes,
    m.BucketCreate,
    m.BucketRemove,
    m.BucketSet,
    m.UploadCreate,
    m.UploadPut,
    m.UploadComplete,
    m.UploadAbort,
)


@dataclass
class _Serving:
    """A request being served."""

    asked: m.Request
    request: m.Request
    """The request as the model understands it."""
    since: int
    blobs: list[BlobId] = field(default_factory=list)
    sequences: list[GroupSequence] = field(default_factory=list)
    decided: bool = False
    versions: list[tuple[str, str, list[tuple[int, bool]]]] = field(default_factory=list)
    """Bucket and key of what was changed, and its versions at that time: order, whether it is `null`."""

    @property
    def durable(self) -> bool:
        """True when the client gets its answer only after all that the answer rests on is durable."""
        return bool(getattr(self.request, "durable", True))


_serving: ContextVar[_Serving | None] = ContextVar("serving", default=None)


class Witness:
    """Watches the decisions of one store."""

    def __init__(self, store: Store, history: History, model: Model, contents: Contents) -> None:
        self._clock = store.clock
        self._contents = contents
        self._history = history
        self._model = model
        self._commit = store.metadata.commit
        self._metadata = store.metadata
        self.repeater = Repeater(store.metadata.stamps, history)
        store.metadata.commit = self.commit  # type: ignore[method-assign]

    async def commit(
        self, decide: Callable[[Transaction], T], *, durable: bool = True, grows: bool = False
    ) -> tuple[T, GroupSequence]:
        """Call `Metadata.commit`, and note the decision."""
        serving = _serving.get()
        expired: list[bytes] = []

        def seen(transaction: Transaction) -> T:
            if serving is not None:
                serving.request = _with_known_nodes(transaction, serving.asked)
            result = decide(transaction)
            if serving is None or not isinstance(serving.request, _CHANGES):
                expired[:] = removed_uploads(transaction)
            if serving is not None:
                names = _changed(serving.asked)
                serving.versions = [(*name, _versions_of(transaction, *name)) for name in names]
            return result

        outcome, sequence = await self._commit(seen, durable=durable, grows=grows)
        for upload in expired:
            self._history.expired(upload, sequence, self._clock.wall_ns())
        if serving and isinstance(serving.request, _CHANGES) and not isinstance(outcome, int):
            self._decided(serving, outcome, sequence)
        self.repeater.check()
        return outcome, sequence

    def _decided(self, serving: _Serving, outcome: object, sequence: GroupSequence) -> None:
        serving.decided = True
        before = self._history.state
        if isinstance(serving.request, m.Commit) and self._is_lie(serving.request, outcome):
            return
        if isinstance(outcome, m.UploadStat):
            serving.blobs = [BlobId(outcome.upload)]
            self._history.begun_ns[outcome.upload] = self._clock.wall_ns()
        expected = self._model.apply(before, serving.request, serving.blobs)
        found = _answers(outcome)
        if isinstance(serving.request, m.UploadComplete) and expected is UploadNotFound:
            serving.sequences.append(self._completed_before(serving, durable=False))
            return
        if isinstance(expected, type) or expected[1] != found:
            raise SimFailure(f"{serving.request}: the engine decided {found}, the model {expected}")
        after = self._with_orders(serving, expected[0])
        if after != before:
            self._history.decided(sequence, after)
            serving.sequences.append(sequence)
        else:
            fits = self._gives(serving, expected[1])
            found_in = self._history.observed(self._history.here, fits, f"{serving.request}", durable=False)
            serving.sequences.append(found_in)

    def _is_lie(self, request: m.Commit, outcome: object) -> bool:
        """Return whether the request names a blob that nobody stored; such a request must have changed nothing."""
        if all(BlobId(change.blob) in self._contents.by_blob for change in request.changes):
            return False
        for answer in _answers(outcome):
            if not (isinstance(answer, type) and issubclass(answer, LakeError)):
                raise SimFailure(f"{request} names what nobody stored, and was answered {answer}")
        return True

    def _with_orders(self, serving: _Serving, state: State) -> State:
        """Return the state with the orders of the versions that the engine made."""
        for bucket, key, versions in serving.versions:
            filled = fill(state, bucket, key, versions)
            if filled is None:
                shown = [state.get(bucket, {}).get(key), *old_of(state, bucket, key)]
                raise SimFailure(f"{serving.request}: {bucket}/{key} has versions {versions}, the model {shown}")
            state = filled
        return state

    def _gives(self, serving: _Serving, answers: list[Answer]) -> Callable[[State], bool]:
        """Return a check for a state: the request would change nothing there and get these answers."""

        def fits(state: State) -> bool:
            outcome = self._model.apply(state, serving.request, serving.blobs)
            return not isinstance(outcome, type) and outcome == (state, answers)

        return fits

    def _completed_before(self, serving: _Serving, *, durable: bool) -> GroupSequence:
        """Note a second completion of an upload: it gets the same answer, and the name has its content."""
        request = serving.request
        assert isinstance(request, m.UploadComplete)
        etag = whole_etag(request.etags).decode()
        serving.decided = True
        return self._history.observed(
            serving.since,
            lambda state: state.get(request.bucket, {}).get(request.key, Bound(NO_BLOB)).etag == etag,
            f"{request} of an upload that was completed before",
            durable=durable,
        )

    # --- answers -----------------------------------------------------------------------------------

    def answered(self, serving: _Serving, reply: Reply) -> None:
        """Check a reply that is about to be sent."""
        request, message = serving.request, reply.message
        if isinstance(request, _CHANGES):
            if not serving.decided and isinstance(request, m.UploadComplete):
                self._completed_before(serving, durable=True)
            if not serving.decided:
                raise SimFailure(f"{request} was answered without a decision")
            for sequence in serving.sequences if serving.durable else ():
                self._history.acknowledged(sequence)
        elif isinstance(request, m.Sync):
            sequence = self._history.points[serving.since].sequence
            if sequence > self._metadata.durable_sequence:
                raise SimFailure(f"Sync was answered before group {sequence} was durable")
            self._history.acknowledged(sequence)
        elif isinstance(request, m.StatNames):
            assert isinstance(message, m.NameResults)
            wanted = request.versions or [""] * len(request.names)
            for name, version, result in zip(request.names, wanted, message.results, strict=True):
                self._check_facts(result.stat)
                self._looked(serving, name, _answer(result), _looking(version, look_up), result.stamps)
        elif isinstance(request, m.OpenObjects):
            assert isinstance(message, m.OpenResults)
            wanted = request.versions or [""] * len(request.names)
            for name, version, opened in zip(request.names, wanted, message.results, strict=True):
                self._check_facts(opened.opened.stat if opened.opened else None)
                self._looked(serving, name, _opened(opened), _looking(version, look_open), opened.stamps)
        else:
            self._listed(serving, message)
        self.repeater.repeat()

    def _listed(self, serving: _Serving, message: m.Message) -> None:
        """Check an answer that is a list."""
        request = serving.request
        if isinstance(request, m.ListNames):
            assert isinstance(message, m.Listed)
            page = [(e.key, None if e.is_prefix else BlobId(e.blob)) for e in message.entries]
            self._history.observed(serving.since, lambda state: page_of(state, request) == page, f"{request}")
        elif isinstance(request, m.BucketList):
            assert isinstance(message, m.Buckets)
            buckets = [bucket.name for bucket in message.buckets]
            self._history.observed(
                serving.since, lambda state: sorted(state.keys() - NO_BUCKETS) == buckets, f"{request}"
            )
        elif isinstance(request, m.ListVersions):
            assert isinstance(message, m.ListedVersions)
            found = [(e.key, e.version, e.is_marker) for e in message.entries]
            self._history.observed(
                serving.since,
                lambda state: request.bucket in state and listed(state, request.bucket) == found,
                f"{request}",
            )
        elif isinstance(request, m.UploadParts):
            assert isinstance(message, m.Parts)
            parts = {part.number: (part.blob, part.etag) for part in message.parts}
            self._history.observed(serving.since, lambda state: parts_of(state, request) == parts, f"{request}")

    def refused(self, serving: _Serving, error: UserError) -> None:
        """Check a request that failed as a whole because of the names."""
        request = serving.request
        if isinstance(request, _CHANGES):
            self._history.observed(
                serving.since,
                lambda state: self._model.apply(state, request, serving.blobs) is type(error),
                f"{request}: {error!r}",
                durable=serving.durable,
            )
        elif isinstance(request, m.ListNames):
            self._history.observed(
                serving.since, lambda state: page_of(state, request) is type(error), f"{request}: {error!r}"
            )

    def _looked(
        self,
        serving: _Serving,
        name: tuple[str, str],
        answer: Answer,
        look: Callable[[State, str, str], Answer],
        stamps: bytes,
    ) -> None:
        what = f"{type(serving.request).__name__} {name} gave {answer!r}"
        if isinstance(answer, type) and not issubclass(answer, UserError):
            if stamps:
                raise SimFailure(f"{what} with stamps, and rests on more than names")
            return  # the workload decides whether such an error is allowed

        def fits(state: State) -> bool:
            return look(state, *name) == answer

        self._history.observed(serving.since, fits, what)
        self.repeater.keep(what, stamps, fits)

    def _check_facts(self, stat: m.ObjectStat | None) -> None:
        """Check that size and ETag follow from the blob."""
        if stat is not None and stat.kind == NodeKind.SYMLINK and stat.size_bytes != len(stat.symlink_target):
            raise SimFailure(f"{stat}: the size of a symlink is its target's")
        if stat is None or not stat.blob:
            return
        blob = BlobId(stat.blob)
        if (blob, stat.etag) in self._contents.multipart_etags:
            return
        expected = (len(self._contents.by_blob[blob]), self._contents.etag_of(blob))
        if (stat.size_bytes, stat.etag) != expected:
            raise SimFailure(f"{stat}: its content has size and ETag {expected}")

    def broken(self, error: Exception) -> None:
        """Keep a bug's exception: a client on a wire would only get an internal error."""
        if not isinstance(error, LakeError):
            self._history.broken = self._history.broken or error

    def serving(self, request: m.Request, body: Body) -> _Serving:
        """Note a request that arrives; its body is whole."""
        serving = _Serving(request, request, self._history.here)
        if isinstance(request, m.PutObjects):
            whole, cuts = body.joined(), pairwise(accumulate(request.lengths, initial=0))
            serving.blobs = [BlobId(data_chunk_id(whole[begin:end])) for begin, end in cuts]
        return serving


class WitnessedService:
    """An `EngineService` whose every answer goes through the witness."""

    def __init__(self, inner: EngineService, witness: Witness) -> None:
        self._inner = inner
        self._witness = witness

    def connected(self, peer: str, **about: Any) -> ServedClient:
        return self._inner.connected(peer, **about)

    async def disconnected(self, client: ServedClient) -> None:
        await self._inner.disconnected(client)

    async def receive(self, client: ServedClient, request: m.Request, *body: Any) -> Body:
        return await self._inner.receive(client, request, *body)

    async def serve(self, client: ServedClient, request: m.Request, body: Body, descriptors: Sequence[int]) -> Reply:
        serving = self._witness.serving(request, body)
        token = _serving.set(serving)
        try:
            reply = await self._inner.serve(client, self._witness.repeater.with_stamps(request), body, descriptors)
            self._witness.answered(serving, reply)
            return reply
        except UserError as error:
            self._witness.refused(serving, error)
            raise
        except Exception as error:
            self._witness.broken(error)
            raise
        finally:
            _serving.reset(token)

    def watch(self, client: ServedClient, request: m.Watch) -> AsyncIterator[m.WatchEvent]:
        return self._inner.watch(client, request)


def _looking(version: str, look: Callable[[State, str, str], Answer]) -> Callable[[State, str, str], Answer]:
    """Return how a name, or a version of it, is looked up; the workload judges one that cannot be opened."""
    if not version:
        return look
    return lambda state, bucket, key: _as_opened(look_up_version(state, bucket, key, version), look)


def _as_opened(found: Answer, look: Callable[[State, str, str], Answer]) -> Answer:
    if look is not look_open:
        return found
    if isinstance(found, Bound) and found.target:
        return InvalidArgument
    return VersionIsMarker if found is None else found


def _changed(request: m.Request) -> list[tuple[str, str]]:
    """Return the names whose versions a request may change; the keys of folders have none."""
    names: list[tuple[str, str]] = []
    if isinstance(request, (m.PutObjects, m.Commit)):
        names = [(change.bucket, change.key) for change in request.changes]
    elif isinstance(request, m.DeleteNames):
        names = list(request.names)
    elif isinstance(request, m.Rename):
        names = [(request.bucket, request.key), (request.to_bucket, request.to_key)]
    elif isinstance(request, m.Copy):
        names = [(request.to_bucket, request.to_key)]
    elif isinstance(request, (m.MakeSymlink, m.UploadComplete)):
        names = [(request.bucket, request.key)]
    return [(bucket, key) for bucket, key in names if not key.endswith("/")]


def _versions_of(view: View, bucket: str, key: str) -> list[tuple[int, bool]]:
    """Return order and whether it is `null`, of the bound version and of the old ones."""
    try:
        ref = find_bucket(view, bucket)
    except UserError:
        return []
    bound = resolve(view, ref, key)
    found = [] if bound is None else [version_of(bound)]
    old = old_versions(view, group_of(ref.node, lookup_path(key))) if ref.versioning else iter(())
    return found + [version_of(node_of(view, one)) for one in old]


def version_of(found: Resolved) -> tuple[int, bool]:
    """Return order and whether it is `null`, of a version."""
    number = found.node.attributes.version
    return abs(number) or found.node_id, number <= 0


def _with_known_nodes(view: View, request: m.Request) -> m.Request:
    """Return the request as the model understands it: `keep_node` is 1 for the present node's id, else -1."""
    if not isinstance(request, (m.PutObjects, m.Commit)) or not any(c.keep_node for c in request.changes):
        return request
    return msgspec.structs.replace(request, changes=[_with_known_node(view, c) for c in request.changes])


def _with_known_node(view: View, change: m.NameChange) -> m.NameChange:
    if not change.keep_node:
        return change
    try:
        present = resolve(view, find_bucket(view, change.bucket), change.key)
    except UserError:
        present = None
    is_kept = present is not None and present.node_id == change.keep_node
    return msgspec.structs.replace(change, keep_node=1 if is_kept else -1)


def bound_of(stat: m.ObjectStat) -> Bound | None:
    """Return what a name is bound to; None for a folder that nobody made."""
    if not stat.blob and stat.kind != NodeKind.SYMLINK:
        return None
    blob = BlobId(stat.blob)
    etag = stat.etag if blob and stat.etag != derived_etag(blob, stat.chunk_count) else ""
    return Bound(blob, stat.symlink_target, stat.xattrs.get(MARK, b""), etag)


def _answers(outcome: object) -> list[Answer]:
    if isinstance(outcome, list):
        return [_answer(result) for result in outcome]
    if isinstance(outcome, Resolved):
        node = outcome.node
        if node.blob is None and node.kind is not NodeKind.SYMLINK:
            return [None]
        target, mark = node.attributes.symlink_target, node.attributes.xattrs.get(MARK, b"")
        etag = "" if node.blob is None or node.etag_kind is EtagKind.DERIVED else etag_of(node)
        return [Bound(node.blob or NO_BLOB, target, mark, etag)]
    return [None]


def _answer(result: m.NameResult) -> Answer:
    if result.failure is not None:
        return _error_class(result.failure)
    return None if result.stat is None else bound_of(result.stat)


def _opened(result: m.OpenResult) -> Answer:
    if result.failure is not None:
        return _error_class(result.failure)
    assert result.opened is not None
    return bound_of(result.opened.stat)


def _error_class(failure: m.Failure) -> type[LakeError]:
    return type(failure.as_error())
