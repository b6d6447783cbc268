"""The superblock: the identity of a store, its last boot, and the sequence of its last clean stop.

Rules kept here:
- Nothing of a store is read or changed before its lock is held.  When two first starts run at
  once, the one that gets the lock creates the store, and the other raises StoreLocked.
- The superblock is replaced whole: temporary name, sync, rename, sync of the folder.  So a reader sees the old one or
  the new one.
- The copy is replaced in the same way, before the superblock, so it is never older.  Opening reads the copy only when
  the superblock is damaged.  It uses a copy that is whole and belongs to the same store as the journal and checkpoints
  beside it; the engine rewrites both before it serves.  A missing superblock was removed by a person or program:
  `lake fsck --repair` restores it, an opening does not.
- An unknown format version or incompatible feature is refused by name.  With an unknown read-only feature the caller
  may read the store but not write to it; `engine.store.opening`, which writes, refuses it.  The superblock has a text
  of the release that set the feature, by which the refusal names it.
- If the lock file's inode is not the one in the superblock, the store was copied.  It gets a new engine id, or is
  refused if it belongs to a cluster, where two engines of one id would do harm.
- A superblock is never created beside files of a journal, checkpoints or segments: they belong to a store whose
  superblock is lost, and a new one would orphan them.

It does not decide when a stop is clean: the code that stops the store writes `clean_sequence`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final

from crc32c import crc32c

from engine.format.features import (
    FEATURE_TEXT_AT,
    KNOWN_INCOMPAT,
    KNOWN_READ_ONLY,
    Feature,
    bits,
    feature_text,
    pack_feature_text,
)
from engine.format.group_parts import FIRST_SHARD
from engine.format.layouts import (
    CHECKPOINT_HEADER,
    FORMAT_VERSION,
    GRANULE,
    JOURNAL_HEADER,
    NOT_CLEAN,
    PAGE,
    SUPERBLOCK,
    SUPERBLOCK_MAGIC,
    StoreIdentity,
)
from engine.host.failpoints import reached
from engine.host.small_file import replace_small_file
from engine.superblock.reserve import Reserve, refuse_unknown_size
from lakefs.errors import LakeError, StoreDamaged, StoreFull, StoreUnusable
from lakefs.findings import Finding
from lakefs.ids import BootId, EngineId, NamesShard, StoreId, new_id16
from lakefs.ports import Clock, Disk, DiskLock

SUPERBLOCK_PATH: Final = "superblock"
COPY_PATH: Final = "superblock.copy"
LOCK_PATH: Final = "lock"
ROOT_FOLDER: Final = ""
STORE_FOLDERS: Final = ("journal", "checkpoints", "segments")
NO_CLUSTER: Final = bytes(16)
_CHECKED_BYTES: Final = SUPERBLOCK.size - 4
_REMEDY: Final = "it is mended from its copy by the next start, and by: lake fsck --data DIR --repair"
_VERSION_AT: Final = 8
_DOMAIN_BYTES: Final = 16
_DOMAINS_MAX: Final = 1024 // _DOMAIN_BYTES


@dataclass(frozen=True)
class Superblock:
    """The fields of the superblock.  `clean_sequence` is None while the store is open or after a crash."""

    store_id: StoreId
    engine_id: EngineId
    boot_id: BootId
    identity_inode: int
    created_ns: int
    clean_sequence: int | None
    domains: tuple[bytes, ...]
    cluster_id: bytes = NO_CLUSTER
    compat_features: int = 0
    read_only_features: int = 0
    incompat_features: int = 0
    names_shard: NamesShard = FIRST_SHARD
    """The names shard whose names it holds, where it holds names."""
    next_space: int = 0
    """The lowest number of a space that was not handed out, kept here while no record has it; 0: none was."""
    feature_text: dict[int, str] = field(default_factory=dict, compare=False)
    """Text of the release that wrote it about its read-only features, by bit."""
    boot_before: bytes = field(default=b"", compare=False)
    """Boot id in the superblock on disk, when this boot has another."""

    @property
    def identity(self) -> StoreIdentity:
        """The ids that every header of this store's files carries."""
        return StoreIdentity(self.store_id, self.boot_id, self.boot_before or self.boot_id)

    def pack(self) -> bytes:
        """Pack the 4,096 bytes of the file."""
        assert 1 <= len(self.domains) <= _DOMAINS_MAX, "a store has a domain, and all fit"
        head = SUPERBLOCK.pack(
            SUPERBLOCK_MAGIC,
            FORMAT_VERSION,
            GRANULE,
            self.store_id,
            self.engine_id,
            self.cluster_id,
            self.boot_id,
            self.compat_features,
            self.read_only_features,
            self.incompat_features,
            self.identity_inode,
            self.created_ns,
            NOT_CLEAN if self.clean_sequence is None else self.clean_sequence,
            len(self.domains),
            self.names_shard,
            self.next_space,
            b"".join(self.domains),
            0,
        )[:_CHECKED_BYTES]
        page = (head + crc32c(head).to_bytes(4, "little")).ljust(FEATURE_TEXT_AT, b"\0")
        return (page + pack_feature_text(self.read_only_features)).ljust(PAGE, b"\0")


@dataclass(frozen=True)
class BadFile:
    """A file that cannot be used, and the reason."""

    finding: Finding
    path: str
    reason: str


@dataclass(frozen=True)
class Superblocks:
    """The superblock to use, and the bad ones among superblock and copy."""

    good: Superblock
    bad: tuple[BadFile, ...] = ()


@dataclass(frozen=True)
class OpenedStore:
    """A store whose lock is held until `lock` is closed.

    `superblock` has the new boot id and engine id, not yet written.  `read_only` is the reason why the store may not be
    written, else empty.  `warnings` are for the operator's log.
    """

    superblock: Superblock
    lock: DiskLock
    read_only: str = ""
    created: bool = False
    warnings: tuple[str, ...] = ()


def open_store(
    disk: Disk,
    clock: Clock,
    *,
    create: bool,
    cluster_id: bytes = NO_CLUSTER,
    has_names: bool = False,
    names_shard: NamesShard = FIRST_SHARD,
) -> OpenedStore:
    """Take the store's lock and read its superblock, or create the store when there is none.

    `cluster_id`: the lake of which a store that is created here is a member, or holds the names of one shard
    (`has_names`, `names_shard`); NO_CLUSTER: it is the store of one engine.  Call `store_role.refuse_other_role`
    behind it.
    Blocks; call it through `Offload`.  Errors: StoreLocked; StoreUnusable (no store and not `create`, unknown
    version or feature, a copy of a cluster member, a disk of unknown size); StoreDamaged (superblock lost, or bad with
    its copy).  An error releases the lock.
    """
    if not create and not disk.exists(SUPERBLOCK_PATH):
        raise StoreUnusable("there is no store here; `lake serve` creates one", subject=SUPERBLOCK_PATH)
    if create:
        disk.make_folder(ROOT_FOLDER)
    refuse_unknown_size(disk)
    lock = disk.lock(LOCK_PATH)
    try:
        if not disk.exists(SUPERBLOCK_PATH):
            features = _features_of(cluster_id, has_names=has_names)
            return OpenedStore(_create(disk, clock, cluster_id, features, names_shard), lock, created=True)
        # The last process may have been killed between renaming its superblock and syncing the name.
        disk.sync_folder(ROOT_FOLDER)
        superblock, warnings = _superblock_or_copy(disk)
        return _admit(disk, superblock, lock, warnings)
    except BaseException:
        lock.close()
        raise


def read_superblock(disk: Disk, path: str = SUPERBLOCK_PATH) -> Superblock:
    """Read the superblock, or its copy, from disk.  StoreDamaged, StoreUnusable; FileNotFoundError."""
    return parse_superblock(read_head(disk, path))


def read_head(disk: Disk, path: str) -> bytes:
    """Read the first page of a file; shorter if the file is."""
    page = bytearray(PAGE)
    with closing(disk.open(path, read_only=True)) as file:
        return bytes(page[: file.pread_into(memoryview(page), 0)])


def survey_superblocks(disk: Disk) -> Superblocks:
    """Read the superblock and its copy.  StoreDamaged when neither can be used, StoreUnusable for a later format."""
    found: dict[str, Superblock] = {}
    bad: list[BadFile] = []
    for path, missing in ((SUPERBLOCK_PATH, Finding.SUPERBLOCK_MISSING), (COPY_PATH, Finding.SUPERBLOCK_COPY_MISSING)):
        try:
            found[path] = _read_whole(disk, path)
        except FileNotFoundError:
            bad.append(BadFile(missing, path, "it is missing"))
        except StoreDamaged as error:
            bad.append(BadFile(error.finding, path, what_is_wrong(error)))
    if not found:
        raise StoreDamaged(
            f"neither {SUPERBLOCK_PATH} nor {COPY_PATH} can be used (the first: {bad[0].reason}; the second: "
            f"{bad[1].reason}); nothing was changed; put one of them back, of this store, and start again",
            subject=SUPERBLOCK_PATH,
            finding=Finding.SUPERBLOCKS_LOST,
        )
    if len(found) < 2 or found[SUPERBLOCK_PATH].store_id != found[COPY_PATH].store_id:
        known = set(_store_ids(disk))
        for path in [path for path, superblock in found.items() if known and superblock.store_id not in known]:
            bad.append(BadFile(Finding.SUPERBLOCK_FOREIGN, path, "it is another store's"))
            del found[path]
    if len({superblock.store_id for superblock in found.values()}) != 1:
        raise StoreDamaged(
            "the superblock is not the one of the journal beside it; put this store's back, or its copy",
            subject=SUPERBLOCK_PATH,
            finding=Finding.STORE_MIXED,
        )
    return Superblocks(found.get(SUPERBLOCK_PATH) or found[COPY_PATH], tuple(bad))


def parse_superblock(page: bytes) -> Superblock:
    """Parse and check the superblock in `page`.  Features are not checked here."""
    if len(page) < SUPERBLOCK.size or page[:_VERSION_AT] != SUPERBLOCK_MAGIC:
        raise _damaged(f"the superblock is not one: its first bytes are wrong; {_REMEDY}")
    fields = SUPERBLOCK.unpack_fields(page)
    if fields["format_version"] != FORMAT_VERSION:
        raise StoreUnusable(
            f"the store has format version {fields['format_version']}; this release reads {FORMAT_VERSION}",
            subject=SUPERBLOCK_PATH,
        )
    if crc32c(page[:_CHECKED_BYTES]) != fields["crc"]:
        raise _damaged(f"the superblock does not match its checksum; {_REMEDY}")
    if fields["granule_bytes"] != GRANULE or not 1 <= fields["domain_count"] <= _DOMAINS_MAX:
        raise StoreUnusable(
            f"the superblock says granule {fields['granule_bytes']}, domains {fields['domain_count']}",
            subject=SUPERBLOCK_PATH,
        )
    clean, domains = fields["clean_sequence"], fields["domains"][: fields["domain_count"] * _DOMAIN_BYTES]
    return Superblock(
        store_id=StoreId(fields["store_id"]),
        engine_id=EngineId(fields["engine_id"]),
        boot_id=BootId(fields["boot_id"]),
        identity_inode=fields["identity_inode"],
        created_ns=fields["created_ns"],
        clean_sequence=None if clean == NOT_CLEAN else clean,
        domains=tuple(domains[at : at + _DOMAIN_BYTES] for at in range(0, len(domains), _DOMAIN_BYTES)),
        cluster_id=fields["cluster_id"],
        compat_features=fields["compat_features"],
        read_only_features=fields["read_only_features"],
        incompat_features=fields["incompat_features"],
        names_shard=NamesShard(fields["names_shard"]),
        next_space=fields["next_space"],
        feature_text=feature_text(page),
    )


def write_superblock(disk: Disk, superblock: Superblock, reserve: Reserve | None = None) -> None:
    """Replace the copy, then the superblock; durable on return.  On a full disk, release the reserve and write again.

    After an error the superblock is the old or the new one, and the copy is the same or newer.
    """
    while True:
        try:
            for path in (COPY_PATH, SUPERBLOCK_PATH):
                write_one(disk, path, superblock.pack())
            return
        except StoreFull:
            if reserve is None or not reserve.release():
                raise


def write_one(disk: Disk, path: str, page: bytes) -> None:
    """Replace the superblock, or its copy alone, by a page; durable on return."""
    assert len(page) == PAGE, "a superblock is written whole"
    replace_small_file(disk, path, page, points="superblock")


def what_is_wrong(error: LakeError) -> str:
    """Return the first part of an error's message, without the remedy."""
    return error.message.partition(";")[0]


def _superblock_or_copy(disk: Disk) -> tuple[Superblock, tuple[str, ...]]:
    """Return the superblock, or its copy with warnings for the operator.  StoreDamaged, StoreUnusable."""
    try:
        return _read_whole(disk, SUPERBLOCK_PATH), ()
    except StoreDamaged as error:
        found = survey_superblocks(disk)
        warning = f"{what_is_wrong(error)}: the store is opened from {COPY_PATH}, and the superblock written anew"
        return found.good, (warning,)


def _read_whole(disk: Disk, path: str) -> Superblock:
    """Read a superblock; a version that does not match the checksum is damage, not a later format."""
    page = read_head(disk, path)
    try:
        return parse_superblock(page)
    except StoreUnusable as error:
        # The version is read before the checksum, which a later format may keep elsewhere.
        mended = page[:_VERSION_AT] + FORMAT_VERSION.to_bytes(4, "little") + page[_VERSION_AT + 4 :]
        try:
            parse_superblock(mended)
        except LakeError:
            raise error from None
        raise _damaged("the superblock's version does not match its checksum", path) from error


def _damaged(message: str, path: str = SUPERBLOCK_PATH) -> StoreDamaged:
    return StoreDamaged(message, subject=path, finding=Finding.SUPERBLOCK_DAMAGED)


def _store_ids(disk: Disk) -> Iterator[bytes]:
    """Yield the store ids in readable headers of the journal's files and the checkpoints."""
    for folder, layout in (("journal", JOURNAL_HEADER), ("checkpoints", CHECKPOINT_HEADER)):
        for name in disk.list_folder(folder):
            page = read_head(disk, f"{folder}/{name}")
            if len(page) < layout.size:
                continue
            fields = layout.unpack_fields(page)
            if fields["crc"] == crc32c(page[: layout.size - 4]) and any(fields["store_id"]):
                yield bytes(fields["store_id"])


def _create(disk: Disk, clock: Clock, cluster_id: bytes, features: int, names_shard: NamesShard) -> Superblock:
    for folder in STORE_FOLDERS:
        if disk.list_folder(folder):
            raise StoreDamaged(
                f"the superblock is missing but {folder}/ holds files of a store; restore it from its copy with: "
                "lake fsck --data DIR --repair, or move the files away to begin a new store",
                subject=SUPERBLOCK_PATH,
                finding=Finding.SUPERBLOCK_MISSING,
            )
        disk.make_folder(folder)
    reached("store.folders-made")
    disk.sync_folder(ROOT_FOLDER)  # a superblock that survives a crash finds its folders
    superblock = Superblock(
        store_id=StoreId(new_id16()),
        engine_id=EngineId(new_id16()),
        boot_id=BootId(new_id16()),
        identity_inode=disk.stat(LOCK_PATH).inode,
        created_ns=clock.wall_ns(),
        clean_sequence=0,
        domains=(new_id16(),),
        cluster_id=cluster_id,
        incompat_features=features,
        names_shard=names_shard,
    )
    write_superblock(disk, superblock)
    return superblock


def _features_of(cluster_id: bytes, *, has_names: bool) -> int:
    if cluster_id == NO_CLUSTER:
        assert not has_names, "names without segments are those of a lake"
        return 0
    return int(Feature.CLUSTER | Feature.CLUSTER_NAMES if has_names else Feature.CLUSTER)


def _admit(disk: Disk, superblock: Superblock, lock: DiskLock, told: tuple[str, ...] = ()) -> OpenedStore:
    unknown = superblock.incompat_features & ~KNOWN_INCOMPAT
    if unknown:
        raise StoreUnusable(
            f"the store uses features this release does not know: {', '.join(_feature_names(unknown))}; "
            "open it with a newer release",
            subject=SUPERBLOCK_PATH,
        )
    read_only = ""
    unknown = superblock.read_only_features & ~KNOWN_READ_ONLY
    if unknown:
        names = "; ".join(superblock.feature_text.get(bit, f"bit {bit}") for bit in bits(unknown))
        read_only = f"the store uses features that this release does not know: {names}; open it with a newer release"
    warnings = list(told)
    inode = disk.stat(LOCK_PATH).inode
    engine_id = superblock.engine_id
    if inode != superblock.identity_inode:
        if superblock.incompat_features & Feature.CLUSTER_NAMES:
            raise StoreUnusable(
                f"the folder is one of the copies of the names of the lake {superblock.cluster_id.hex()}, which are "
                "opened together; start the lake with all its folders",
                subject=SUPERBLOCK_PATH,
            )
        if superblock.cluster_id != NO_CLUSTER:
            raise StoreUnusable(
                f"the folder is a copy of a member of the lake {superblock.cluster_id.hex()}, not the folder itself; "
                "bring that one back, or empty this one and run: lake cluster add DIR",
                subject=SUPERBLOCK_PATH,
            )
        engine_id = EngineId(new_id16())
        warnings.append("the store was copied or restored; it has a new engine id now")
    admitted = replace(
        superblock,
        boot_id=BootId(new_id16()),
        engine_id=engine_id,
        identity_inode=inode,
        boot_before=superblock.boot_id,
    )
    return OpenedStore(admitted, lock, read_only, warnings=tuple(warnings))


def _feature_names(mask: int) -> list[str]:
    known = {int(feature): feature.name.lower() for feature in Feature}
    return [known.get(1 << bit, f"bit {bit}") for bit in bits(mask)]
