"""Features of a store: bits of its superblock, and a text by which an earlier release names those it does not know.

    superblock, at byte 2,048:  feature text header, then lines of UTF-8 text: BIT, a space, what it is

Bits of the text are those of the read-only features.  A text that is not whole is no text: the bits alone decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from crc32c import crc32c

from lakefs.layout import Layout

FEATURE_TEXT_AT: Final = 2048
FEATURE_TEXT_HEADER: Final = Layout("feature text header", 6, [("text_bytes", "H"), ("crc", "I")])
_TEXT_BYTES_MAX: Final = 2048 - FEATURE_TEXT_HEADER.size


class Feature(IntEnum):
    """Incompatible features, and bits reserved for some: a release that does not know one refuses the store by name.

    CLUSTER: the store is a member of a lake, or holds its names (CLUSTER_NAMES).  ERASURE_SHARDS: it has shards, which
    only a member is sent.
    """

    ENCRYPTION = 1 << 0
    COMPRESSION = 1 << 1
    ERASURE_SHARDS = 1 << 2
    KEYED_BLOBS = 1 << 3
    MORE_DOMAINS = 1 << 4
    CLUSTER = 1 << 5
    CLUSTER_NAMES = 1 << 6


class ReadOnlyFeature(IntEnum):
    """Features with which a release that does not know them does not write, so does not open a store; set when a store
    first uses them."""

    # The table `uploads` refers to chunks: gc of a release that does not know it would free them.
    UPLOADS = 1 << 0
    # Nodes without a name are old versions: a release that does not know them would lose the newest by a put.
    VERSIONS = 1 << 1
    KEYED = 1 << 2  # as UPLOADS
    # Nodes of kinds that a release that does not know them cannot read.
    SPECIAL_NODES = 1 << 3


class FeatureNote(NamedTuple):
    """The name of a feature for people, and the first release that knows it."""

    name: str
    release: str


FEATURE_NOTES: Final = {
    ReadOnlyFeature.UPLOADS: FeatureNote("multipart uploads", "0.1.0"),
    ReadOnlyFeature.VERSIONS: FeatureNote("buckets that keep versions", "0.1.0"),
    ReadOnlyFeature.KEYED: FeatureNote("spaces of keyed blobs (lake kv)", "0.1.0"),
    ReadOnlyFeature.SPECIAL_NODES: FeatureNote("pipes, sockets and device nodes", "0.1.0"),
}
KNOWN_READ_ONLY: Final = int(
    ReadOnlyFeature.UPLOADS | ReadOnlyFeature.VERSIONS | ReadOnlyFeature.KEYED | ReadOnlyFeature.SPECIAL_NODES
)
KNOWN_INCOMPAT: Final = int(Feature.ERASURE_SHARDS | Feature.CLUSTER | Feature.CLUSTER_NAMES)


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    return (bit for bit in range(64) if mask >> bit & 1)


def pack_feature_text(read_only_features: int) -> bytes:
    """Pack the text about the features that are set: header and lines."""
    noted = [(bit, FEATURE_NOTES[ReadOnlyFeature(1 << bit)]) for bit in bits(read_only_features & KNOWN_READ_ONLY)]
    text = "".join(f"{bit} {note.name}, known from release {note.release} on\n" for bit, note in noted).encode()
    assert len(text) <= _TEXT_BYTES_MAX, "the text fits behind the superblock"
    return FEATURE_TEXT_HEADER.pack(len(text), crc32c(text)) + text


def feature_text(page: bytes) -> dict[int, str]:
    """Return what the superblock's page says of each bit; nothing if the text is not whole."""
    if len(page) < FEATURE_TEXT_AT + FEATURE_TEXT_HEADER.size:
        return {}
    length, crc = FEATURE_TEXT_HEADER.unpack_from(page, FEATURE_TEXT_AT)
    begin = FEATURE_TEXT_AT + FEATURE_TEXT_HEADER.size
    text = page[begin : begin + length]
    if len(text) < length or crc32c(text) != crc:
        return {}
    lines = (line.partition(" ") for line in text.decode(errors="replace").splitlines())
    return {int(bit): said for bit, _, said in lines if bit.isdecimal()}
