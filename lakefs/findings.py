"""Kinds of findings: all that fsck, scrub and repair report about a store, each with a code that scripts can match.

The code is the member's name in lower case, with hyphens: `CHUNK_DAMAGED` is `chunk-damaged`.  Codes stay the same
from release to release; a new kind gets a new code.  The severity belongs to the kind, so all findings of one kind
have the same.  A finding's message says more, and may change between releases.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Finding(Enum):
    """One kind of finding; the value says what it means and what to do."""

    # payload
    CHUNK_DAMAGED = "The stored bytes do not match their checksum. Put the same bytes again."
    CHUNK_HASH_WRONG = "The stored bytes match their checksum, not the chunk's id. Put the same bytes again."
    CHUNK_PAST_END = "The segment's file ends before the chunk. Put the file back, or the same bytes again."
    CHUNK_QUARANTINED = "An earlier read found the stored bytes damaged. Put the same bytes again."
    CHUNK_RECORD_WRONG = "The chunk's record gives it an impossible length. Put the same bytes again."
    CHUNKS_OVERLAP = "Two chunks have one place in a segment: one is damaged. Run `lake fsck --full`."
    READ_FAILED = "Something could not be read; the message says why. Check the disk, then run it again."
    SEGMENT_DUPLICATE = "Two files claim to be one segment. Remove the one that is not this store's."
    SEGMENT_FOREIGN = "A segment's file belongs to another segment or store. Put this store's file back."
    SEGMENT_MISSING = "A segment's file does not exist. Put the file back, or the same bytes again."

    # content of objects, versions and upload parts
    CONTENT_CHUNK_DAMAGED = "The content has a damaged chunk. Put the same bytes again."
    CONTENT_CHUNK_MISSING = "The content has a chunk that is not stored. Put the same bytes again."
    CONTENT_CHUNK_SIZE_WRONG = "A chunk of the content has a wrong length. Put the content again."
    CONTENT_MANIFEST_DAMAGED = "A manifest of the content cannot be used. Put the same bytes again."
    CONTENT_MANIFEST_MISSING = "A manifest of the content is not stored. Put the same bytes again."
    CONTENT_SIZE_WRONG = "The content has another length than its record says. Put the content again."

    # names, versions, uploads, access keys
    ACCESS_KEY_UNREADABLE = "An access key's record cannot be read. Delete the key, and create another."
    KEYED_MISFILED = "A keyed value belongs to a space that does not exist. gc keeps its chunks; rebuild the index."
    KEYED_UNREADABLE = "The record of a keyed value or space cannot be read. Put the value again."
    KEYED_USAGE_WRONG = "A space's usage is not that of its values. Remove the space, and open it again."
    NAME_KIND_WRONG = "A name and its node disagree about the kind. Remove the name; put the object again."
    NAME_NODE_MISSING = "A name's node does not exist. Remove the name, and put the object again."
    NODE_UNNAMED = "A node has no name. Its content is kept and cannot be reached; rebuild the index."
    OBJECT_PARTS_UNREADABLE = "The list of an object's parts cannot be read. Put the object again."
    OBJECT_PARTS_WRONG = "The list of an object's parts does not make up its content. Put the object again."
    PART_UNREADABLE = "The record of an upload's part cannot be read. Send the part again."
    PART_WITHOUT_UPLOAD = "A part belongs to no upload, and keeps its chunks. Rebuild the index."
    SYMLINK_DAMAGED = "A symlink has no target, a wrong length, or a blob. Remove it, and make it again."
    UPLOAD_MISFILED = "An upload is stored under the key of another. Abort it, and begin it again."
    UPLOAD_UNREADABLE = "An upload's record cannot be read. Begin the upload again."
    VERSION_BUCKET_MISSING = "A version belongs to a bucket that does not exist. Rebuild the index."
    VERSION_KIND_WRONG = "A version is a folder. Delete the version."
    VERSION_MISFILED = "A version is stored under a wrong key or order. Rebuild the index."
    VERSION_NODE_MISSING = "A version refers to a node that does not exist. Delete the version."
    VERSION_NODE_UNREADABLE = "The node of a version cannot be read. Delete the version."
    VERSION_UNREADABLE = "A version's record cannot be read. Rebuild the index."

    # files of the store
    CHECKPOINT_DAMAGED = "A checkpoint is not whole. Run `lake fsck --repair`."
    CHECKPOINT_FOREIGN = "A checkpoint was renamed, or belongs to another store. Run `lake fsck --repair`."
    INDEX_BEHIND = "The index is older than the checkpoint. The next start rebuilds it, and `--repair` does."
    INDEX_DAMAGED = "The index is not what was written. The engine rebuilds it, and `--repair` does."
    INDEX_FOREIGN = "The index belongs to another store. The next start rebuilds it, and `--repair` does."
    INDEX_MISSING = "There is no index. The next start makes it anew, and `--repair` does."
    INDEX_READER_DIED = "A process died reading the index. The next start rebuilds it, and `--repair` does."
    JOURNAL_CUT_SHORT = "The journal ends before a group that was durable. Run `lake fsck --repair`."
    JOURNAL_DAMAGED = "A group of the journal cannot be read. Run `lake fsck --repair`."
    JOURNAL_FOREIGN = "A journal file was renamed, or belongs to another store. Run `lake fsck --repair`."
    JOURNAL_HEADER_DAMAGED = "The header of a journal file cannot be read. Run `lake fsck --repair`."
    JOURNAL_MISSING = "Groups of the journal are in no file. Put the file back, or run `lake fsck --repair`."
    STORE_DAMAGED = "A file of the store is damaged; the message says which, and what to do."
    STORE_MIXED = "Superblock and journal belong to different stores. Put this store's superblock back."
    STORE_UNUSABLE = "A file or record is not known to this release. Use the release that wrote it."
    SUPERBLOCK_DAMAGED = "The superblock or its copy is not whole. Run `lake fsck --repair`."
    SUPERBLOCK_FEATURE_MISSING = "The superblock lacks a feature that the store uses. The next start sets it."
    SUPERBLOCK_FOREIGN = "The superblock or its copy is another store's. Run `lake fsck --repair`."
    SUPERBLOCK_MISSING = "The superblock does not exist. `lake fsck --repair` writes it from its copy."
    SUPERBLOCKS_LOST = "Neither the superblock nor its copy can be used. Put one of them back."

    # these are notes
    CHUNK_UNCHECKED = "A chunk was moved again and again, and was not checked. Run `lake fsck --full` again."
    FILE_HALF_WRITTEN = "A crash left a file half-written. `lake fsck --repair` removes it."
    GARBAGE = "Nothing refers to some chunks. gc frees them, unless damaged manifests may refer to them."
    JOURNAL_GROUPS_VOID = "Journal groups do not count: a later file took their place. See if two engines run."
    MEMBER_UNCHECKED = "A member did not answer, and was not checked. See `lake status`; run it again when it is up."
    SHARD_DAMAGED = "A shard is damaged, and its chunk can be read. The lake's walker makes it anew."
    STRIPE_SHORT = "Shards of chunks are not at their homes; the chunks can be read. The lake's walker heals them."
    SUPERBLOCK_COPY_MISSING = "The superblock has no copy, as in earlier releases. The next start writes it."
    UPLOADS_ORPHANED = "Uploads belong to buckets that do not exist. gc removes them."

    @property
    def code(self) -> str:
        """The stable code, for scripts."""
        return self.name.lower().replace("_", "-")

    @property
    def severity(self) -> str:
        """`damage`: something stored can no longer be served as it was.  `note`: no stored object is affected."""
        return "note" if self in _NOTES else "damage"

    def as_json(self, subject: str, message: str) -> dict[str, str]:
        """Return a finding of this kind as JSON documents list it."""
        return {"severity": self.severity, "code": self.code, "object": subject, "message": message}


_NOTES: Final = frozenset(
    {
        Finding.CHUNK_UNCHECKED,
        Finding.FILE_HALF_WRITTEN,
        Finding.GARBAGE,
        Finding.JOURNAL_GROUPS_VOID,
        Finding.MEMBER_UNCHECKED,
        Finding.SHARD_DAMAGED,
        Finding.STRIPE_SHORT,
        Finding.SUPERBLOCK_COPY_MISSING,
        Finding.UPLOADS_ORPHANED,
    }
)
