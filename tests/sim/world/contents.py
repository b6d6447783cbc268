"""Payload for a simulated run: bytes from the seed, and the content of each blob id.

Sizes lie where the engine does something else: nothing, packed payloads, the last packed and the first paged one, more
than one granule, contents cut in several chunks.  Some of the contents are used again, so that chunks are shared.
"""

from __future__ import annotations

import hashlib
import json
import random

from lakefs.content.chunking import iter_extents, plan_file
from lakefs.content.manifest import CutKind, ManifestTree, build, derived_etag
from lakefs.ids import EMPTY_BLOB, BlobId, ChunkId, data_chunk_id
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES

_EDGES = (GRANULE_BYTES - 1, GRANULE_BYTES, GRANULE_BYTES + 1)
_RECENT = 24


class Contents:
    """Makes contents, and remembers every one by its blob id."""

    def __init__(self, rng: random.Random, *, huge: bool) -> None:
        """`huge`: make contents of about a chunk's greatest length, too."""
        self._rng = rng
        self._huge = huge
        self._recent: list[bytes] = []
        self.by_blob: dict[BlobId, bytes] = {EMPTY_BLOB: b""}
        self._chunk_counts: dict[BlobId, int] = {EMPTY_BLOB: 1}
        self.by_part_etag: dict[bytes, bytes] = {}
        """Parts of multipart uploads by their MD5."""
        self.multipart_etags: set[tuple[BlobId, str]] = set()

    def take(self) -> bytes:
        """Return a content to put: new, or one of the recent ones."""
        if self._recent and self._rng.random() < 0.3:
            return self._rng.choice(self._recent)
        return self._keep(self._new())

    def take_small(self) -> bytes:
        """Return a new content that is packed."""
        return self._keep(self._rng.randbytes(self._rng.choice((1, 7, 200, 3000))))

    def blob_of(self, content: bytes) -> BlobId:
        """Return the blob id that a put of this content must give."""
        plan = plan_file(lambda offset, length: content[offset : offset + length], len(content))
        chunks = [
            (data_chunk_id(content[offset : offset + length]), length)
            for offset, length in iter_extents(plan.lengths())
        ]
        return self._register(build(plan.cut_kind, chunks), content)

    def compose(self) -> tuple[list[bytes], ManifestTree]:
        """Return several small contents to be stored as the chunks of one blob, and its manifest."""
        parts = [self._keep(self._part()) for _ in range(self._rng.randint(2, 5))]
        tree = build(CutKind.PARTS, [(data_chunk_id(part), len(part)) for part in parts])
        self._register(tree, b"".join(parts))
        return parts, tree

    def some_parts(self) -> list[bytes]:
        """Return contents to be stored as the parts of an upload, of one chunk each."""
        return [self._keep(self._part()) for _ in range(self._rng.randint(1, 4))]

    def register_parts(self, parts: list[bytes]) -> tuple[BlobId, str]:
        """Register the whole of parts of one chunk each; return its blob and its ETag."""
        tree = build(CutKind.PARTS, [(data_chunk_id(part), len(part)) for part in parts])
        blob = self._register(tree, b"".join(parts))
        digests = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
        etag = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
        self.multipart_etags.add((blob, etag))
        return blob, etag

    def etag_of(self, blob: BlobId) -> str:
        """Return the ETag that a name bound to the blob has."""
        return derived_etag(blob, self._chunk_counts[blob])

    def register_chunk(self, payload: bytes) -> ChunkId:
        """Register a chunk put as an object of its own."""
        chunk = data_chunk_id(payload)
        self.by_blob[BlobId(chunk)] = payload
        self._chunk_counts[BlobId(chunk)] = 1
        return chunk

    def _register(self, tree: ManifestTree, content: bytes) -> BlobId:
        self.by_blob[tree.blob] = content
        self._chunk_counts[tree.blob] = max(1, tree.chunk_count)
        return tree.blob

    def _part(self) -> bytes:
        if self._recent and self._rng.random() < 0.4:
            used = self._rng.choice(self._recent)
            if used:
                return used[:CHUNK_BYTES]
        return self._rng.randbytes(self._rng.choice((1, 50, 4096, 5000, GRANULE_BYTES, 70_000)))

    def _new(self) -> bytes:
        rng = self._rng
        choice = rng.random()
        if choice < 0.05:
            return b""
        if choice < 0.45:
            return rng.randbytes(rng.randint(1, 300))
        if choice < 0.70:
            return rng.randbytes(rng.randint(301, 20_000))
        if choice < 0.82:
            return rng.randbytes(rng.choice(_EDGES))
        if choice < 0.92:
            return rng.randbytes(rng.randint(GRANULE_BYTES + 2, 3 * GRANULE_BYTES))
        if self._huge and choice < 0.95:
            return rng.randbytes(CHUNK_BYTES + rng.choice((-1, 0, 1)))
        return _safetensors(rng.randbytes(rng.randint(8, 90_000)))

    def _keep(self, content: bytes) -> bytes:
        if content and len(content) < 4 * GRANULE_BYTES:
            self._recent.append(content)
            if len(self._recent) > _RECENT:
                self._recent.pop(0)
        return content


def _safetensors(tensor: bytes) -> bytes:
    """Return a file of two chunks and a manifest: the header, and one tensor."""
    entry = {"dtype": "U8", "shape": [len(tensor)], "data_offsets": [0, len(tensor)]}
    header = json.dumps({"weights": entry}).encode()
    return len(header).to_bytes(8, "little") + header + tensor
