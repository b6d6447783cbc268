"""Checks multipart uploads and access keys of an open store, for `engine.fsck.check`.

Every part must belong to an upload, and its blob must exist with the part's length.  The list of parts kept of an
object must make up its content.  Records of access keys must be readable.  Damaged parts are named by bucket, key,
upload and number.  Uploads of removed buckets are a `note`: gc removes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from engine.format.layouts import Table
from engine.fsck.report import Problem
from engine.metadata.metadata_store import Metadata
from engine.namespace.access_keys import unpack_access_key
from engine.namespace.walk import paths_of, records, value_of
from engine.uploads.keys import (
    OBJECT_PARTS_BEGIN,
    OBJECT_PARTS_END,
    PARTS_BEGIN,
    PARTS_END,
    UPLOADS_BEGIN,
    UPLOADS_END,
    bucket_of,
    part_of,
    upload_key,
    upload_of,
)
from engine.uploads.lifecycle import is_orphan, unpack_part, unpack_upload
from engine.uploads.object_parts import problem_of
from lakefs.errors import LakeError
from lakefs.findings import Finding
from lakefs.ids import BlobId

BlobProblem = Callable[[BlobId, int], Awaitable[Problem | None]]
"""Returns the problem of a blob with a given length, or None."""


class UploadCheck:
    """Checks the tables `uploads` and `access_keys`, page by page, beside writers.

    Memory: the damaged records.
    """

    def __init__(self, metadata: Metadata, blob_problem: BlobProblem) -> None:
        self._metadata = metadata
        self._blob_problem = blob_problem
        self._damaged: dict[bytes, Problem] = {}
        """Problems, by the key of an upload or part."""
        self.orphans = 0
        self.counts = {"uploads": 0, "parts": 0, "access_keys": 0}

    async def run(self) -> None:
        """Check all records."""
        async for key, value in records(self._metadata, Table.UPLOADS, UPLOADS_BEGIN, UPLOADS_END):
            self._upload(key, value)
        async for key, value in records(self._metadata, Table.UPLOADS, PARTS_BEGIN, PARTS_END):
            self.counts["parts"] += 1
            await self._part(key, value)
        async for key, _ in records(self._metadata, Table.UPLOADS, OBJECT_PARTS_BEGIN, OBJECT_PARTS_END):
            self._object_parts(key)
        async for key, value in records(self._metadata, Table.ACCESS_KEYS, b"", b"\xff"):
            self.counts["access_keys"] += 1
            try:
                unpack_access_key(value)
            except (LakeError, msgspec.DecodeError) as error:
                message = f"an access key whose record cannot be read: {error}"
                self._damaged[key] = Problem(Finding.ACCESS_KEY_UNREADABLE, message)

    async def parts_again(self) -> None:
        """Check parts again, after more chunks were found damaged."""
        async for key, value in records(self._metadata, Table.UPLOADS, PARTS_BEGIN, PARTS_END):
            await self._part(key, value)

    async def findings(self) -> list[tuple[str, Problem]]:
        """Return the damaged records by name, with their problems."""
        return [(await self.name_of(key), problem) for key, problem in self._damaged.items()]

    def _upload(self, key: bytes, value: bytes) -> None:
        self.counts["uploads"] += 1
        try:
            record = unpack_upload(value)
        except (LakeError, msgspec.DecodeError) as error:
            self._damaged[key] = Problem(Finding.UPLOAD_UNREADABLE, f"an upload whose record cannot be read: {error}")
            return
        if upload_key(bucket_of(key), record.key.encode(), upload_of(key)) != key:
            self._damaged[key] = Problem(Finding.UPLOAD_MISFILED, "an upload under the key of another")
        with self._metadata.view() as view:
            if view.get(Table.UPLOADS, key) is not None and is_orphan(view, key):
                self.orphans += 1

    def _object_parts(self, key: bytes) -> None:
        upload, page = part_of(key)
        try:
            with self._metadata.view() as view:
                message = problem_of(view, upload) if page == 0 else ""
        except (LakeError, msgspec.DecodeError) as error:
            self._damaged[key] = Problem(Finding.OBJECT_PARTS_UNREADABLE, str(error))
        else:
            if message:
                self._damaged[key] = Problem(Finding.OBJECT_PARTS_WRONG, message)

    async def _part(self, key: bytes, value: bytes) -> None:
        try:
            part = unpack_part(value)
            problem = await self._blob_problem(BlobId(part.blob), part.size_bytes)
            if not problem and value_of(self._metadata, Table.UPLOADS, part.upload_key) is None:
                problem = Problem(Finding.PART_WITHOUT_UPLOAD, "belongs to no upload, and keeps its chunks")
        except (LakeError, msgspec.DecodeError) as error:
            problem = Problem(Finding.PART_UNREADABLE, str(error))
        if problem and value_of(self._metadata, Table.UPLOADS, key) == value:
            self._damaged[key] = problem

    async def name_of(self, key: bytes) -> str:
        """Return the name of an upload, a part, or an access key."""
        if key[:1] == UPLOADS_BEGIN:
            return await self._upload_name(key, f"upload {upload_of(key).hex()}")
        if key[:1] == OBJECT_PARTS_BEGIN:
            return f"the parts of the object of upload {part_of(key)[0].hex()}"
        if key[:1] != PARTS_BEGIN:
            return f"access key {key.decode(errors='replace')}"
        upload, number = part_of(key)
        value = value_of(self._metadata, Table.UPLOADS, key)
        what = f"upload {upload.hex()}, part {number}"
        try:
            return what if value is None else await self._upload_name(unpack_part(value).upload_key, what)
        except (LakeError, msgspec.DecodeError):
            return what

    async def _upload_name(self, key: bytes, what: str) -> str:
        """Return `BUCKET/KEY, WHAT`, as far as it is known."""
        value = value_of(self._metadata, Table.UPLOADS, key)
        if value is None:
            return what
        bucket = bucket_of(key)
        paths = await paths_of(self._metadata, [bucket])
        try:
            return f"{paths.get(bucket, f'node {bucket}/')}{unpack_upload(value).key}, {what}"
        except (LakeError, msgspec.DecodeError):
            return what
