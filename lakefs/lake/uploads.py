"""The multipart uploads of a lake, as steps; `lakefs.lake.multipart` carries them out."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeGuard, cast

from lakefs.get.opened import Access
from lakefs.host.writable_memory import ReadableBuffer
from lakefs.lake.multipart import (
    ListedPart,
    UploadName,
    abort_upload,
    complete_upload,
    copy_part,
    create_upload,
    list_parts,
    list_uploads,
    put_part,
    put_part_stream,
)
from lakefs.names import parse_name, parse_new_name, parse_object_name
from lakefs.put.shared_memory import Slot
from lakefs.put.sources import FileSource, memory_source
from lakefs.put.upload import Transfer
from lakefs.steps.steps import Page, Pages, Steps, work
from lakefs.wire.messages import (
    NO_CONDITION,
    Condition,
    ObjectAttributes,
    ObjectStat,
    Parts,
    PartStat,
    UploadEntry,
    UploadList,
    Uploads,
)

Progress = Callable[[int, int], None]
"""Called with increments: (bytes done, how many of them the store had before)."""

PutData: TypeAlias = ReadableBuffer | Slot | os.PathLike[str] | BinaryIO
"""Data to put: a buffer, array or tensor, a slot of shared memory, the path of a file, or a binary file object, read to
its end."""


class UploadSteps(ABC):
    """Multipart uploads of a lake."""

    @abstractmethod
    def transfer(self, progress: Progress | None) -> Transfer:
        """Return the settings of this client's puts."""

    @abstractmethod
    def access(self, progress: Progress | None) -> Access:
        """Return the settings of this client's reads."""

    def create_upload(
        self, name: str, attributes: ObjectAttributes | None = None, *, details: Mapping[str, str] | None = None
    ) -> Steps[UploadName]:
        """Begin a multipart upload to a name, whose bucket must exist; durable on return.

        The object gets these attributes; without a modification time it gets the time of its completion.  Lists of
        uploads return the `details` (at most 1 KiB).
        """
        return create_upload(parse_new_name(name), attributes or ObjectAttributes(), details)

    def put_part(
        self,
        upload: UploadName,
        number: int,
        data: PutData,
        *,
        md5: bytes | None = None,
        checksums: Mapping[str, bytes] | None = None,
        progress: Progress | None = None,
    ) -> Steps[PartStat]:
        """Store data as part `number` (1 to 10,000) of an upload, in any order; durable on return.

        A part that has the number is replaced.  `md5` (16 bytes) is the part's ETag; it is computed if it is not given.
        UploadNotFound, InvalidArgument, RequestTooLarge (over 5 GiB), StoreFull, SourceChanged, LocalFileError.
        """
        transfer = self.transfer(progress)
        if is_stream(data):
            return (yield from put_part_stream(transfer, upload, number, data, checksums=checksums))
        if isinstance(data, os.PathLike):
            file = yield from work(FileSource, Path(data))
            try:
                return (yield from put_part(transfer, upload, number, file, md5=md5, checksums=checksums))
            finally:
                file.close()
        source = memory_source(cast("ReadableBuffer | Slot", data))
        return (yield from put_part(transfer, upload, number, source, md5=md5, checksums=checksums))

    def copy_part(
        self,
        upload: UploadName,
        number: int,
        source: str,
        *,
        offset: int = 0,
        length: int | None = None,
        if_match: str = "",
    ) -> Steps[PartStat]:
        """Make a range of an object (to its end if no length is given) a part; whole chunks in it are not copied.

        `if_match`: the object must have this ETag.  KeyNotFound, PreconditionFailed, InvalidArgument (the range).
        """
        return copy_part(
            self.access(None),
            self.transfer(None),
            upload,
            number,
            parse_object_name(source),
            offset=offset,
            length=length,
            if_match=if_match,
        )

    def parts(self, upload: UploadName) -> Pages[PartStat]:
        """List all parts of an upload by number; pages are requested as they are needed.  UploadNotFound."""
        return self._parts_behind(upload, 0)

    def _parts_behind(self, upload: UploadName, after: int) -> Pages[PartStat]:
        page = yield from self.parts_page(upload, after=after)
        return Page(page.parts, self._parts_behind(upload, page.next_after) if page.next_after else None)

    def uploads(self, name: str) -> Pages[UploadEntry]:
        """List all unfinished uploads to keys that begin with the name's key, in byte order, page by page."""
        return self._uploads_behind(name, "", b"")

    def _uploads_behind(self, name: str, after: str, after_upload: bytes) -> Pages[UploadEntry]:
        page = yield from self.uploads_page(name, after=after, after_upload=after_upload)
        after, after_upload = page.next_after, page.next_upload
        return Page(page.entries, self._uploads_behind(name, after, after_upload) if after else None)

    def parts_page(self, upload: UploadName, *, after: int = 0, limit: int = 1000) -> Steps[Parts]:
        """Return one page of an upload's parts by number; UploadNotFound."""
        return list_parts(upload, after=after, limit=limit)

    def uploads_page(
        self, name: str, *, after: str = "", after_upload: bytes = b"", delimiter: str = "", limit: int = 1000
    ) -> Steps[Uploads]:
        """Return one page of a bucket's unfinished uploads to keys that begin with the name's key, by key and id."""
        bucket, prefix = parse_name(name)
        return list_uploads(UploadList(bucket, prefix, after, after_upload, delimiter, limit))

    def complete_upload(
        self,
        upload: UploadName,
        parts: Sequence[ListedPart | tuple[int, bytes]],
        *,
        checksums: Mapping[str, bytes] | None = None,
        condition: Condition = NO_CONDITION,
    ) -> Steps[ObjectStat]:
        """Make the listed parts (number, ETag of 16 bytes) the object; drop the others.  Durable on return.

        No payload is copied.  UploadNotFound, InvalidPart, InvalidPartOrder, PartTooSmall, PreconditionFailed.
        """
        listed = [ListedPart(*part) for part in parts]
        return complete_upload(self.transfer(None), upload, listed, checksums=checksums, condition=condition)

    def abort_upload(self, upload: UploadName) -> Steps[None]:
        """End an upload and drop its parts; the object at the name stays.  UploadNotFound."""
        return abort_upload(upload)


def is_stream(data: PutData) -> TypeGuard[BinaryIO]:
    """Return True for a file object; an array and a buffer have no method `read`."""
    return getattr(data, "read", None) is not None
