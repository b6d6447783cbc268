"""`LakeSteps`: the object service as steps, one method for each thing a user does with names and blobs.

The public clients (`lakefs.client.blocking.lake.Lake`, `lakefs.client.trio.lake.TrioLake`) make their methods from
these (`lakefs.client.facade`): users see the signatures and docstrings of this class.  A name is text as users write
it: `BUCKET/KEY`, with or without `lake://`.

docs/durability.md has the store's promises.  In short: a change is durable when its method returns, a name changes
atomically, and bytes were checked before they are returned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from lakefs.content.verify import Check
from lakefs.errors import BucketNotFound, KeyNotFound, LakeError
from lakefs.get.opened import AT_ONCE_BYTES, Access, Learner
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.host.writable_memory import ReadableBuffer
from lakefs.lake.reads import ReadSteps
from lakefs.lake.spaces import SpacesSteps
from lakefs.lake.uploads import Progress as Progress, PutData as PutData, UploadSteps, is_stream
from lakefs.names import Name, check_text, parse_name, parse_new_name, parse_object_name
from lakefs.put.lent import return_memory
from lakefs.put.many import put_many
from lakefs.put.objects import put, put_stream
from lakefs.put.shared_memory import LentMemories, SharedMemory, Slot
from lakefs.put.sources import FileSource, memory_source
from lakefs.put.upload import PutResult, Transfer, only_result, result_of
from lakefs.steps.steps import Page, Pages, Steps, send, work
from lakefs.wire.messages import (
    AccessKeyCreate,
    AccessKeyList,
    AccessKeyRemove,
    AccessKeys,
    AccessKeyStat,
    AddNamesShard,
    BucketCreate,
    BucketList,
    BucketRemove,
    Buckets,
    BucketSet,
    BucketStat,
    ChangeMember,
    Condition,
    Copy,
    DeleteNames,
    Listed,
    ListEntry,
    ListNames,
    MakeFolder,
    NameChange,
    NameResults,
    ObjectAttributes,
    ObjectStat,
    Rename,
    ReportReply,
    RunFsck,
    RunGc,
    RunScrub,
    SetLake,
    StatNames,
    Status,
    StatusReply,
)
from lakefs.wire.offers import Offers

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric


@dataclass(frozen=True)
class LakeSteps(UploadSteps, ReadSteps, SpacesSteps):
    """All operations of a client, as steps.  `network`: the engine is reached over TCP."""

    descriptors: SegmentDescriptors
    offers: Offers
    network: bool = False
    check: Check = Check.BLAKE3
    lent: LentMemories = field(default_factory=LentMemories)
    at_once_bytes: int = AT_ONCE_BYTES
    """Most bytes of cached content that are copied and checked between two steps, in the driver's own thread."""
    is_held: Callable[[int], bool] = lambda epoch: True
    """See `Access.is_held`."""
    learner: Learner | None = None
    """Learns the answers to requests about names."""
    fabric: ClientFabric | None = None
    """RDMA to the engine, over a network."""

    # --- writing ---------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        data: PutData,
        *,
        content_type: str = "",
        user_metadata: dict[str, str] | None = None,
        if_absent: bool = False,
        if_match: str = "",
        create_bucket: bool = False,
        progress: Progress | None = None,
    ) -> Steps[PutResult]:
        """Store data under a name, replacing the object that has it; durable on return.

        `data`: bytes, any other buffer, an array (numpy's, or one with `__array_interface__` or `__dlpack__`), a torch
        tensor, a slot of shared memory, the path of a file (`pathlib.Path`), or a binary stream, which is read to its
        end.  Arrays and tensors are contiguous and in this machine's memory: their bytes are stored, without type and
        shape.  A file's permission bits and modification time are stored with it.
        `if_absent`: store only if the name does not exist.  `if_match`: store only if the object has this ETag.
        `create_bucket`: make the bucket if it does not exist.
        `progress(bytes_done, bytes_already_there)` is called with increments.

        PreconditionFailed, KeyNotFound (`if_match`, and the name does not exist), StoreFull, SourceChanged,
        LocalFileError, InvalidName, InvalidArgument, BucketNotFound.
        """
        condition = Condition(absent=if_absent, etags=[if_match] if if_match else [])
        attributes = ObjectAttributes(content_type=content_type, user_metadata=user_metadata or {})
        change = NameChange(*parse_new_name(name), b"", attributes, condition, create_bucket)
        transfer = self.transfer(progress)
        if is_stream(data):
            return (yield from put_stream(transfer, change, data))
        if isinstance(data, os.PathLike):
            return (yield from self.put_file(change, Path(data), progress))
        return (yield from put(transfer, change, memory_source(cast("ReadableBuffer | Slot", data))))

    def put_file(self, change: NameChange, path: Path, progress: Progress | None) -> Steps[PutResult]:
        """Store a regular file with its permission bits and modification time; otherwise like `put`."""
        source = yield from work(FileSource, path)
        try:
            attributes = msgspec.structs.replace(change.attributes, mode=source.mode, mtime_ns=source.mtime_ns)
            changed = msgspec.structs.replace(change, attributes=attributes)
            return (yield from put(self.transfer(progress), changed, source))
        finally:
            source.close()

    def put_many(
        self, objects: Sequence[tuple[str, ReadableBuffer | Slot]], *, create_bucket: bool = False, in_flight: int = 256
    ) -> Steps[list[ObjectStat]]:
        """Store many small objects (each at most 4 MiB, one chunk) in few journal groups; return stats in order.

        `objects`: pairs of a name and a buffer, array, tensor or slot of shared memory.  All are durable on return.
        At most `in_flight` objects are under way, in two requests: the engine receives one while it syncs the other (in
        one request if two would have less than 64 short objects each).  Each name changes atomically by itself.
        InvalidName and InvalidArgument are raised before any request is sent; other failures do not stop the rest, and
        the first is raised after all were tried.
        """
        return put_many(
            self.transfer(None), objects, ObjectAttributes(), create_bucket=create_bucket, in_flight=in_flight
        )

    def return_memory(self, memory: SharedMemory) -> Steps[None]:
        """End the lending of a shared memory, if it was lent; on return the engine no longer touches the memory."""
        return return_memory(self.lent, memory)

    # --- names -----------------------------------------------------------------------------------

    def stat(self, name: str) -> Steps[ObjectStat]:
        """Return the stat of an object; of a folder if the key ends in `/` or is empty.

        KeyNotFound, BucketNotFound.
        """
        parsed = parse_name(name)
        learner = self.learner
        request = StatNames([(parsed.bucket, parsed.key)], stamps=learner is not None and learner.wants_stamps)
        reply = yield from send(request)
        stat = only_result(reply)
        if learner is not None:
            assert isinstance(reply.message, NameResults)
            learner.learn([(parsed, stat, reply.message.results[0].stamps)], reply.epoch, is_opened=False)
        return stat

    def stat_many(self, names: Sequence[Name]) -> Steps[list[ObjectStat | LakeError]]:
        """Return the stats of names, in order; for a name that fails, its error, such as KeyNotFound."""
        reply = yield from send(StatNames([(name.bucket, name.key) for name in names]))
        assert isinstance(reply.message, NameResults)
        stats: list[ObjectStat | LakeError] = []
        for item in reply.message.results:
            try:
                stats.append(result_of(item))
            except LakeError as error:
                stats.append(error)
        return stats

    def exists(self, name: str) -> Steps[bool]:
        """Return True if a name exists; False also if its bucket does not exist."""
        try:
            yield from self.stat(name)
        except (KeyNotFound, BucketNotFound):
            return False
        return True

    def ls(self, name: str, *, delimiter: str = "", folders: bool = False) -> Pages[ListEntry]:
        """List all keys that begin with the name's key, in byte order; pages are requested as they are needed.

        `delimiter` ("" or "/"): keys that have it after that beginning are rolled up into one entry for each prefix.
        `folders`: list bare folders too.
        """
        return self._keys_behind(name, "", delimiter, folders)

    def _keys_behind(self, name: str, after: str, delimiter: str, folders: bool) -> Pages[ListEntry]:
        page = yield from self.list_page(name, after=after, delimiter=delimiter, folders=folders)
        after = page.next_after
        return Page(page.entries, self._keys_behind(name, after, delimiter, folders) if after else None)

    def list_page(
        self, name: str, *, after: str = "", delimiter: str = "", limit: int = 1000, folders: bool = False
    ) -> Steps[Listed]:
        """Return one page of `ls`: at most `limit` entries, strictly after the key `after`."""
        bucket, prefix = parse_name(name)
        reply = yield from send(ListNames(bucket, prefix, after, delimiter, limit, folders))
        assert isinstance(reply.message, Listed)
        return reply.message

    def remove(self, name: str) -> Steps[bool]:
        """Remove an object, or an empty folder; return False if it did not exist."""
        return (yield from self.remove_many([parse_object_name(name)])) == 1

    def remove_many(self, names: Sequence[Name]) -> Steps[int]:
        """Remove up to 1000 objects; return how many existed.  The first failure is raised after all were tried."""
        reply = yield from send(DeleteNames([(name.bucket, name.key) for name in names]))
        assert isinstance(reply.message, NameResults)
        present = [item for item in reply.message.results if item.failure or item.stat]
        return len([result_of(item) for item in present])

    def move(self, source: str, target: str, *, replace: bool = True, create_bucket: bool = False) -> Steps[ObjectStat]:
        """Rename an object, or a folder (both names end in `/`), atomically.

        An object that has the target's name is replaced; with `replace=False` AlreadyExists is raised instead.
        `create_bucket`: make the target's bucket if it does not exist.
        """
        old, new = parse_object_name(source), parse_new_name(target)
        return only_result((yield from send(Rename(*old, *new, replace, create_bucket))))

    def copy(self, source: str, target: str, *, create_bucket: bool = False) -> Steps[ObjectStat]:
        """Give an object's content and attributes a second name; no byte is copied.

        `create_bucket`: make the target's bucket if it does not exist.
        """
        old, new = parse_object_name(source), parse_new_name(target)
        return only_result((yield from send(Copy(*old, *new, create_bucket=create_bucket))))

    def make_folder(self, name: str, *, exclusive: bool = False, create_bucket: bool = False) -> Steps[ObjectStat]:
        """Make a folder that stays when it is empty.  `exclusive`: AlreadyExists if it exists."""
        bucket, key = parse_new_name(name)
        folder_key = key if key.endswith("/") else key + "/"
        return only_result((yield from send(MakeFolder(bucket, folder_key, exclusive, create_bucket))))

    # --- buckets -------------------------------------------------------------------------------

    def buckets(self) -> Steps[list[BucketStat]]:
        """Return all buckets, in byte order of their names."""
        return _bucket_list((yield from send(BucketList())).message)

    def create_bucket(self, name: str) -> Steps[BucketStat]:
        """Make a bucket; AlreadyExists."""
        return _bucket_list((yield from send(BucketCreate(check_text(name)))).message)[0]

    def remove_bucket(self, name: str) -> Steps[None]:
        """Remove an empty bucket; BucketNotFound, BucketNotEmpty."""
        yield from send(BucketRemove(check_text(name)))

    def bucket(self, name: str) -> Steps[BucketStat]:
        """Return a bucket and its settings; BucketNotFound."""
        return _bucket_list((yield from send(BucketList(check_text(name)))).message)[0]

    def set_bucket(
        self, name: str, *, anonymous_read: bool | None = None, versioning: str | None = None
    ) -> Steps[BucketStat]:
        """Change settings of a bucket (see `BucketStat`); None leaves one.  BucketNotFound, InvalidArgument."""
        return _bucket_list((yield from send(BucketSet(check_text(name), anonymous_read, versioning))).message)[0]

    # --- access keys -----------------------------------------------------------------------------

    def create_access_key(self, *, buckets: Sequence[str] = (), read_only: bool = False) -> Steps[AccessKeyStat]:
        """Make an access key for these buckets (none: for all); return it with its secret.  Durable on return."""
        names = [check_text(name) for name in buckets]
        return _key_list((yield from send(AccessKeyCreate(names, read_only))).message).keys[0]

    def access_keys(self) -> Steps[list[AccessKeyStat]]:
        """Return all access keys (at most ACCESS_KEYS_MAX exist), in byte order, without their secrets."""
        found: list[AccessKeyStat] = []
        after = ""
        while True:
            page = _key_list((yield from send(AccessKeyList(after=after))).message)
            found += page.keys
            after = page.next_after
            if not after:
                return found

    def find_access_key(self, access_key: str) -> Steps[AccessKeyStat | None]:
        """Return an access key with its secret; None if it was never made, or was revoked."""
        if not check_text(access_key):
            return None
        page = _key_list((yield from send(AccessKeyList(access_key, secrets=True))).message)
        return page.keys[0] if page.keys else None

    def remove_access_key(self, access_key: str) -> Steps[None]:
        """Revoke an access key: on return no lookup finds it.  AccessKeyNotFound."""
        yield from send(AccessKeyRemove(check_text(access_key)))

    # --- upkeep ----------------------------------------------------------------------------------

    def status(self) -> Steps[dict[str, Any]]:
        """Return the state of the engine."""
        reply = yield from send(Status())
        assert isinstance(reply.message, StatusReply)
        return _object_of(reply.message.status_json)

    def gc(self, *, compact: bool = False) -> Steps[dict[str, Any]]:
        """Run one full cycle of garbage collection, then compaction; return the report.

        `compact`: compact also where that frees little.
        """
        reply = yield from send(RunGc(compact))
        assert isinstance(reply.message, ReportReply)
        return _object_of(reply.message.report_json)

    def fsck(self, *, full: bool = False) -> Steps[dict[str, Any]]:
        """Check the store while it serves; return the report.  `full`: read every byte."""
        reply = yield from send(RunFsck(full))
        assert isinstance(reply.message, ReportReply)
        return _object_of(reply.message.report_json)

    def scrub(
        self, *, for_s: float = 0.0, rate_bytes_per_s: int | None = None, restart: bool = False, damaged: bool = False
    ) -> Steps[dict[str, Any]]:
        """Continue the scrub's pass, or begin one, for `for_s` seconds (at most 60; 0: not at all); return its report.

        The report's `done` is true if a pass ended in that time.  `rate_bytes_per_s`: 0 is unbounded, None the
        engine's own rate.  `restart` begins a new pass.  With `damaged` the report has the quarantine: the damaged
        chunks, and the objects that they are in.
        """
        rate = -1 if rate_bytes_per_s is None else rate_bytes_per_s
        reply = yield from send(RunScrub(for_s, rate, restart, damaged))
        assert isinstance(reply.message, ReportReply)
        return _object_of(reply.message.report_json)

    def change_member(self, member: bytes, change: int, *, accept_loss: bool = False) -> Steps[None]:
        """Change a member of a lake: see ChangeMember."""
        yield from send(ChangeMember(member, change, accept_loss))

    def set_lake(self, *, out_after_s: int = 0, out_stops: str = "") -> Steps[None]:
        """Change settings of a whole lake: see SetLake."""
        yield from send(SetLake(out_after_s, out_stops))

    def add_names_shard(self) -> Steps[dict[str, Any]]:
        """Add a names shard to a lake: see AddNamesShard."""
        reply = yield from send(AddNamesShard())
        assert isinstance(reply.message, ReportReply)
        return _object_of(reply.message.report_json)

    # --- for the modules beside this one ---------------------------------------------------------

    def transfer(self, progress: Progress | None) -> Transfer:
        """Return the settings of this client's puts."""
        transfer = Transfer(offers=self.offers, network=self.network, lent=self.lent, fabric=self.fabric)
        return replace(transfer, progress=progress) if progress else transfer

    def access(self, progress: Progress | None) -> Access:
        """Return the settings of this client's reads."""
        access = Access(
            self.descriptors,
            self.offers,
            self.check,
            self.offers.media,
            self.at_once_bytes,
            is_held=self.is_held,
            learner=self.learner,
            fabric=self.fabric,
        )
        return replace(access, progress=progress) if progress else access


def _bucket_list(message: object) -> list[BucketStat]:
    assert isinstance(message, Buckets)
    return message.buckets


def _key_list(message: object) -> AccessKeys:
    assert isinstance(message, AccessKeys)
    return message


def _object_of(text: str) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(text))
