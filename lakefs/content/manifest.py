"""Manifests: the canonical encoding of a blob's layout, built while bytes arrive and parsed without trust.

A manifest lists (chunk, length) in the order of the bytes; `docs/format.md`, section Manifest, is normative.  A blob
of one chunk has no manifest, and the blob of no bytes is `EMPTY_BLOB`.

Rules kept here:
- One sequence of (chunk, length) and one cut kind give one tree, byte for byte: manifests fill from the left, and a
  level is added only if there is more than one manifest below it.
- A payload's length is checked before anything in it is used, and no count in it is trusted.
- `parse` proves that a manifest is well formed, `check_top` and `check_child` that it is where it may be.  Other
  modules check that the chunks exist.

Manifests of a hostile client can name one child many times, so a walk over a tree that is not known to be sound must
remember the ids it has seen: the number of distinct manifests is bounded by what was stored, that of paths is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from lakefs.errors import InvalidArgument
from lakefs.ids import EMPTY_BLOB, BlobId, Buffer, ChunkId, ChunkKind, blob_of, id_text, kind_of, manifest_chunk_id
from lakefs.layout import Layout
from lakefs.limits import BLOB_BYTES_MAX, CHUNK_BYTES, MANIFEST_FANOUT, MANIFEST_LEVELS_MAX

MANIFEST_HEADER: Final = Layout(
    "manifest header",
    32,
    [
        ("magic", "4s"),
        ("version", "B"),
        ("hash_kind", "B"),
        ("cut_kind", "B"),
        ("level", "B"),
        ("size_bytes", "Q"),
        ("entry_count", "I"),
        ("reserved", "12s"),
    ],
)
MANIFEST_ENTRY: Final = Layout("manifest entry", 40, [("digest", "32s"), ("size_bytes", "Q")])
MANIFEST_MAGIC: Final = b"LMAN"
MANIFEST_VERSION: Final = 1
HASH_BLAKE3: Final = 1
MANIFEST_BYTES_MAX: Final = MANIFEST_HEADER.size + MANIFEST_FANOUT * MANIFEST_ENTRY.size
"""Longest manifest: 32 + 8192 x 40 bytes = 320 KiB and 32 bytes."""

_RESERVED: Final = bytes(12)
_EMPTY_MD5: Final = "d41d8cd98f00b204e9800998ecf8427e"


class CutKind(IntEnum):
    """Kind of a blob's cuts; one for all manifests of a blob.  Stated by the writer, not proven."""

    FIXED = 1
    SAFETENSORS = 2
    PARTS = 3


class Entry(NamedTuple):
    """A data chunk (level 0) or a manifest of the level below, and the number of content bytes in it."""

    chunk: ChunkId
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """One manifest, checked; `size_bytes` is the sum over `entries` (1 to 8,192 of them)."""

    cut_kind: CutKind
    level: int
    size_bytes: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class ManifestTree:
    """A finished layout: the blob's id, its length and count of data chunks, and manifests yet to be stored.

    `manifests` are (id, payload), children before parents, the top last; empty if the blob is empty or a lone chunk.
    Equal content gives equal manifests, so an id may occur more than once.
    """

    blob: BlobId
    size_bytes: int
    manifests: list[tuple[ChunkId, bytes]]
    chunk_count: int


def parse(payload: Buffer) -> Manifest:
    """Parse untrusted bytes as a manifest; at most 8,192 entries of work (about 4 ms).

    InvalidArgument names the first thing wrong.  The payload's own id is not checked.
    """
    nbytes = len(payload)
    count, rest = divmod(nbytes - MANIFEST_HEADER.size, MANIFEST_ENTRY.size)
    if rest or not 1 <= count <= MANIFEST_FANOUT:
        raise _refused(f"{nbytes} bytes are not a header and 1 to {MANIFEST_FANOUT} entries")
    magic, version, hash_kind, cut, level, size, entry_count, reserved = MANIFEST_HEADER.unpack_from(payload)
    if magic != MANIFEST_MAGIC:
        raise _refused(f"it begins with {bytes(magic)!r}, not with {MANIFEST_MAGIC!r}")
    if version != MANIFEST_VERSION:
        raise _refused(f"version {version} is not known here")
    if hash_kind != HASH_BLAKE3:
        raise _refused(f"hash kind {hash_kind} is not known here")
    if cut not in _CUT_KINDS:
        raise _refused(f"cut kind {cut} is not known here")
    if level > MANIFEST_LEVELS_MAX:
        raise _refused(f"level {level} is above {MANIFEST_LEVELS_MAX}")
    if reserved != _RESERVED:
        raise _refused("reserved bytes are not zero")
    if entry_count != count:
        raise _refused(f"it says {entry_count} entries and has room for {count}")
    prefix = bytes([_entry_kind(level)])
    rows = MANIFEST_ENTRY.struct.iter_unpack(memoryview(payload)[MANIFEST_HEADER.size :])
    entries = tuple([Entry(ChunkId(prefix + digest), length) for digest, length in rows])
    _check_sizes(level, size, [entry.size_bytes for entry in entries])
    return Manifest(CutKind(cut), level, size, entries)


def _check_sizes(level: int, size_bytes: int, sizes: Sequence[int]) -> None:
    """Check that entries' lengths fit the level, and that their sum is the header's.

    Every entry but the last is a full subtree, of 8,192 to the power of `level` chunks.
    """
    subtree_chunks = MANIFEST_FANOUT**level
    if min(sizes) < 1 or min(sizes[:-1], default=subtree_chunks) < subtree_chunks:
        raise _refused(f"an entry of {min(sizes)} bytes is too short for level {level}")
    if max(sizes) > subtree_chunks * CHUNK_BYTES:
        raise _refused(f"an entry of {max(sizes)} bytes is too long for level {level}")
    total = sum(sizes)
    if total != size_bytes:
        raise _refused(f"it says {size_bytes} bytes and its entries have {total}")
    if total > BLOB_BYTES_MAX:
        raise _refused(f"{total} bytes are more than a blob may have ({BLOB_BYTES_MAX})")


def check_top(manifest: Manifest) -> None:
    """Check that a blob's top manifest has two entries or more: a lone chunk is its own blob.  InvalidArgument."""
    if len(manifest.entries) < 2:
        raise _refused("a blob's top manifest has at least two entries")


def check_child(parent_entry: Entry, parent: Manifest, child: Manifest) -> None:
    """Check that `child`, parsed from the chunk that `parent_entry` of `parent` names, is what the parent says.

    Level, cut kind and length agree, and only a last child may be less than full.  InvalidArgument.  Not checked:
    that a full child of a full parent is itself full all the way down its right side.
    """
    subject = id_text(parent_entry.chunk)
    if child.level != parent.level - 1:
        raise _refused(f"level {child.level} stands below level {parent.level}", subject)
    if child.cut_kind is not parent.cut_kind:
        raise _refused(f"cut kind {child.cut_kind.name} stands below {parent.cut_kind.name}", subject)
    if child.size_bytes != parent_entry.size_bytes:
        raise _refused(f"its parent gives it {parent_entry.size_bytes} bytes, it has {child.size_bytes}", subject)
    if len(child.entries) < MANIFEST_FANOUT and parent_entry in parent.entries[:-1]:
        raise _refused(f"it has {len(child.entries)} entries and is not the last of its parent", subject)


def chunk_count(top: Manifest, *spine: Manifest) -> int:
    """Return the number of data chunks below `top`.

    `spine` is the right side of the tree: the last child of `top`, the last child of that, down to level 0.  A
    level-0 manifest has no spine.  Exact for canonical trees, in which all but the right side is full.
    """
    count = 0
    for depth, manifest in enumerate((top, *spine)):
        assert manifest.level == top.level - depth, "a spine goes down one level at a time"
        below = 0 if manifest.level else 1
        count += (len(manifest.entries) - 1 + below) * MANIFEST_FANOUT**manifest.level
    assert len(spine) == top.level, "a spine ends at level 0"
    return count


def encode(manifest: Manifest) -> bytes:
    """Return a manifest's payload, as `parse` takes it.  The caller vouches for the fields; `build` makes valid
    ones."""
    pack = MANIFEST_ENTRY.pack
    header = MANIFEST_HEADER.pack(
        MANIFEST_MAGIC,
        MANIFEST_VERSION,
        HASH_BLAKE3,
        manifest.cut_kind,
        manifest.level,
        manifest.size_bytes,
        len(manifest.entries),
        _RESERVED,
    )
    return header + b"".join([pack(entry.chunk[1:], entry.size_bytes) for entry in manifest.entries])


def build(cut_kind: CutKind, chunks: Iterable[tuple[ChunkId, int]]) -> ManifestTree:
    """Return the canonical tree over (data chunk, length), with all its manifests.  Errors as
    `ManifestBuilder.add`."""
    builder = ManifestBuilder(cut_kind)
    manifests: list[tuple[ChunkId, bytes]] = []
    for chunk, size_bytes in chunks:
        manifests += builder.add(chunk, size_bytes)
    tree = builder.finish()
    return ManifestTree(tree.blob, tree.size_bytes, manifests + tree.manifests, tree.chunk_count)


class ManifestBuilder:
    """Builds the canonical tree while chunks arrive.

    Holds at most one open manifest a level (8,192 entries, about 1.5 MiB each), however long the blob.  The manifests
    returned by `add` and those of `finish` are together all manifests, children before parents.
    """

    def __init__(self, cut_kind: CutKind) -> None:
        self._cut_kind = cut_kind
        self._open: list[list[Entry]] = [[]]
        self._size_bytes = 0
        self._chunk_count = 0
        self._finished = False

    def add(self, chunk: ChunkId, size_bytes: int) -> list[tuple[ChunkId, bytes]]:
        """Append a data chunk of 1 byte to 4 MiB; return the manifests that became full, (id, payload), lower first.

        InvalidArgument for another kind or length, and past `BLOB_BYTES_MAX`; nothing is appended then.
        """
        assert not self._finished, "a finished tree takes no more chunks"
        if kind_of(chunk) is not ChunkKind.DATA or not 1 <= size_bytes <= CHUNK_BYTES:
            raise InvalidArgument(
                f"a manifest lists data chunks of 1 to {CHUNK_BYTES} bytes, not one of {size_bytes}",
                subject=id_text(chunk),
            )
        if self._size_bytes + size_bytes > BLOB_BYTES_MAX:
            raise InvalidArgument(f"the content is longer than {BLOB_BYTES_MAX} bytes; store it as several objects")
        self._size_bytes += size_bytes
        self._chunk_count += 1
        self._open[0].append(Entry(chunk, size_bytes))
        full: list[tuple[ChunkId, bytes]] = []
        level = 0
        while len(self._open[level]) == MANIFEST_FANOUT:
            full.append(self._close(level))
            level += 1
        return full

    def finish(self) -> ManifestTree:
        """Close the open manifests.  `manifests` holds only those that `add` has not returned.  Called once."""
        assert not self._finished, "a tree is finished once"
        self._finished = True
        if not self._chunk_count:
            return ManifestTree(EMPTY_BLOB, 0, [], 0)
        manifests: list[tuple[ChunkId, bytes]] = []
        level = 0
        # A lone entry at the highest level is the whole blob: the only chunk, or the only manifest below.
        while level < len(self._open) - 1 or len(self._open[level]) > 1:
            if self._open[level]:
                manifests.append(self._close(level))
            level += 1
        top = self._open[level][0]
        assert top.size_bytes == self._size_bytes, "the top stands for all bytes"
        return ManifestTree(blob_of(top.chunk), self._size_bytes, manifests, self._chunk_count)

    def _close(self, level: int) -> tuple[ChunkId, bytes]:
        """Turn the open entries of a level into a manifest and list it one level up."""
        assert level <= MANIFEST_LEVELS_MAX, "8192^5 chunks are past BLOB_BYTES_MAX"
        entries = tuple(self._open[level])
        self._open[level] = []
        size_bytes = sum(entry.size_bytes for entry in entries)
        payload = encode(Manifest(self._cut_kind, level, size_bytes, entries))
        chunk = manifest_chunk_id(payload)
        if level + 1 == len(self._open):
            self._open.append([])
        self._open[level + 1].append(Entry(chunk, size_bytes))
        return chunk, payload


def derived_etag(blob: BlobId, chunk_count: int) -> str:
    """Return the ETag (without quotes) of content whose MD5 is not known: 32 hex digits, `-`, count of data chunks.

    S3 clients read the `-` as a multipart tag and do not compare it with an MD5.  The empty blob has its MD5.
    """
    if blob == EMPTY_BLOB:
        return _EMPTY_MD5
    return f"{blob[1:17].hex()}-{chunk_count}"


def kept_etag(etag: str, blob: bytes, chunk_count: int) -> tuple[int, bytes]:
    """Return `etag_kind` and `etag` of ObjectAttributes with which an object has the ETag that is shown of this one.

    One that is derived from the content is not kept (0); 1 is an MD5, 2 the text of an upload in parts.
    """
    if not blob or etag == derived_etag(BlobId(blob), chunk_count):
        return 0, b""
    if len(etag) == len(_EMPTY_MD5) and not set(etag) - set("0123456789abcdef"):
        return 1, bytes.fromhex(etag)
    return 2, etag.encode()


def _entry_kind(level: int) -> ChunkKind:
    """Return the kind of the chunks that a manifest of that level lists."""
    return ChunkKind.MANIFEST if level else ChunkKind.DATA


def _refused(why: str, subject: str = "") -> InvalidArgument:
    """Return the error for bytes that are not a manifest of this format."""
    return InvalidArgument(f"not a manifest that this version stores or reads: {why}", subject=subject)


_CUT_KINDS: Final = frozenset(CutKind)
