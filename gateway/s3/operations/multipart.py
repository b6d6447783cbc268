"""Multipart uploads: created, filled part by part, completed, aborted, listed.  All of their state is in the store.

A part is stored as a PUT's payload is, cut from its own start; completing moves no byte.  The checks before an upload
is completed, and the checksum of the whole, are in `gateway.s3.operations.stated_whole`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import trio

from gateway.http.messages import Response
from gateway.s3.operations.buckets import iso_time
from gateway.s3.operations.copying import COPIED_VERSION_HEADER, copy_source
from gateway.s3.operations.stated_whole import (
    ALGORITHM,
    TYPE,
    check_size,
    checked_whole,
    checksum_details,
    part_algorithm,
)
from gateway.s3.operations.storing import store_chunks
from gateway.s3.operations.versions import version_headers
from gateway.s3.protocol import checksums
from gateway.s3.protocol.attributes import attributes_of, checksum_elements
from gateway.s3.protocol.bodies import CompletedPart, read_complete
from gateway.s3.protocol.checksums import ELEMENTS, HEADERS, Algorithm
from gateway.s3.protocol.errors import S3Error, invalid_argument
from gateway.s3.protocol.headers import write_condition
from gateway.s3.protocol.xml import OWNER, document, element, url_encoded
from gateway.s3.request.call import Call, bad_part_number, whole_number, xml_response
from gateway.s3.request.payload import Incoming, read_proven_xml
from lakefs.content.chunking import CutPlan
from lakefs.errors import InvalidArgument
from lakefs.lake.multipart import (
    ListedPart,
    UploadName,
    commit_part,
    complete_upload,
    copy_part,
    create_upload,
    list_parts,
)
from lakefs.limits import S3_PARTS_MAX
from lakefs.names import Name
from lakefs.put.upload import abandon_upload, open_upload
from lakefs.wire.messages import Done, PartStat, UploadAbort, UploadList, Uploads

PART_BYTES_MAX: Final = 5 << 30
_PAGE: Final = 1000
_RANGE: Final = re.compile(rb"bytes=([0-9]{1,15})-([0-9]{1,15})")


async def create_multipart_upload(call: Call) -> Response:
    """Begin an upload; the object will have the metadata of this request."""
    details = checksum_details(call)
    attributes = attributes_of(call.headers)
    upload = await call.lakes.driver.run(create_upload(Name(call.bucket, call.key), attributes, details))
    fields = [element("Bucket", call.bucket), element("Key", call.key), element("UploadId", upload.upload.hex())]
    headers = [(f"x-amz-{name}".encode(), value.encode()) for name, value in details.items()]
    return xml_response(document("InitiateMultipartUploadResult", "".join(fields)), headers)


async def upload_part(call: Call) -> Response:
    """Store a part, which replaces a part of the same number.  Durable on return."""
    upload, number = _upload(call), _part_number(call)
    driver = call.lakes.driver
    # Before the body is received: an upload that does not exist, or has another checksum, takes none.
    details = (await driver.run(list_parts(upload, limit=1))).upload.details
    incoming = Incoming(call, part_algorithm(call, details))
    if incoming.length_bytes > PART_BYTES_MAX:
        raise S3Error(400, "EntityTooLarge", "Your proposed upload exceeds the maximum allowed size of a part.")
    cuts = CutPlan(incoming.length_bytes)
    store = await driver.run(open_upload(driver.steps.transfer(None), cuts.cut_kind))
    try:
        await store_chunks(call, incoming, store, None, cuts.lengths())
        sums = await incoming.finish()
        part = await driver.run(commit_part(store, upload, number, incoming.md5, sums))
    except BaseException:
        with trio.CancelScope(shield=True):
            await driver.run(abandon_upload(store))
        raise
    return Response(200, [(b"ETag", b'"%b"' % part.etag.hex().encode()), *_part_checksums(part)])


async def upload_part_copy(call: Call) -> Response:
    """Make a range of an object a part; chunks that lie in it whole are shared, not copied."""
    upload, number = _upload(call), _part_number(call)
    source = await copy_source(call)
    offset, length = _copied_range(call)
    driver = call.lakes.driver
    steps = copy_part(
        driver.steps.access(None),
        driver.steps.transfer(None),
        upload,
        number,
        source.name,
        offset=offset,
        length=length,
        if_match=source.stat.etag,
        version=source.version,
    )
    try:
        part = await driver.run(steps)
    except InvalidArgument as error:
        raise S3Error(416, "InvalidRange", error.message) from error
    fields = element("LastModified", iso_time(part.mtime_ns)) + element("ETag", f'"{part.etag.hex()}"')
    headers = version_headers(source.stat, COPIED_VERSION_HEADER)
    return xml_response(document("CopyPartResult", fields), headers)


async def complete_multipart_upload(call: Call) -> Response:
    """Make the listed parts the object, in one step; the other parts are dropped."""
    upload = _upload(call)
    wanted = await read_proven_xml(call, read_complete, has_checksum=False)
    sums = await checked_whole(call, upload, wanted)
    parts = [ListedPart(part.number, _etag_bytes(part)) for part in wanted]
    driver = call.lakes.driver
    stat = await driver.run(
        complete_upload(
            driver.steps.transfer(None), upload, parts, checksums=sums, condition=write_condition(call.headers)
        )
    )
    # If the upload was completed before, no part is left to compare.
    check_size(call, stat.size_bytes)
    location = f"http://{call.request.head.authority.decode('latin-1')}/{call.bucket}/{url_encoded(call.key)}"
    fields = [
        element("Location", location),
        element("Bucket", call.bucket),
        element("Key", call.key),
        element("ETag", f'"{stat.etag}"'),
        checksum_elements(stat.checksums),
    ]
    result = document("CompleteMultipartUploadResult", "".join(fields))
    return xml_response(result, version_headers(stat))


async def abort_multipart_upload(call: Call) -> Response:
    """Drop an upload's parts; an object of that name stays."""
    await call.ask(UploadAbort(*_upload(call)), Done)
    return Response(204)


async def list_upload_parts(call: Call) -> Response:
    """Return a page of parts by number."""
    upload = _upload(call)
    marker, limit = _number(call, "part-number-marker", 0), min(_number(call, "max-parts", _PAGE), _PAGE)
    page = await call.lakes.driver.run(list_parts(upload, after=marker, limit=max(1, limit)))
    parts = page.parts if limit else []
    next_after = page.next_after if limit else 0
    fields = [
        element("Bucket", call.bucket),
        element("Key", call.key),
        element("UploadId", upload.upload.hex()),
        element("PartNumberMarker", marker),
        element("NextPartNumberMarker", next_after or (parts[-1].number if parts else marker)),
        element("MaxParts", limit),
        element("IsTruncated", bool(next_after)),
    ]
    fields.append(_checksum_kind(page.upload.details))
    owner = OWNER.replace("Owner>", "Initiator>") + OWNER + "<StorageClass>STANDARD</StorageClass>"
    return xml_response(document("ListPartsResult", "".join([*fields, owner, *map(_listed_part, parts)])))


async def list_multipart_uploads(call: Call) -> Response:
    """Return a page of unfinished uploads, in byte order of their keys, those to one key in order of time."""
    limit = min(_number(call, "max-uploads", _PAGE), _PAGE)
    key_marker, upload_marker = call.parameter("key-marker"), call.parameter("upload-id-marker")
    delimiter = call.parameter("delimiter")
    encoding = call.parameter("encoding-type")
    shown = url_encoded if encoding == "url" else str
    after_upload = _upload_marker(upload_marker) if key_marker and upload_marker else b""
    request = UploadList(call.bucket, call.parameter("prefix"), key_marker, after_upload, delimiter, max(1, limit))
    page = await call.ask(request, Uploads)
    entries = page.entries if limit else []
    is_truncated = bool(limit and page.next_after)
    fields = [
        element("Bucket", call.bucket),
        element("KeyMarker", shown(key_marker)),
        element("UploadIdMarker", upload_marker),
        element("Prefix", shown(call.parameter("prefix"))),
        element("MaxUploads", limit),
        element("IsTruncated", is_truncated),
    ]
    if delimiter:
        fields.append(element("Delimiter", shown(delimiter)))
    if encoding == "url":
        fields.append(element("EncodingType", "url"))
    if is_truncated:
        fields.append(element("NextKeyMarker", shown(page.next_after)))
        fields.append(element("NextUploadIdMarker", page.next_upload.hex()))
    for entry in entries:
        key = element("Key", shown(entry.key))
        if entry.is_prefix:
            fields.append(f"<CommonPrefixes>{element('Prefix', shown(entry.key))}</CommonPrefixes>")
            continue
        begun = element("UploadId", entry.upload.hex()) + element("Initiated", iso_time(entry.created_ns))
        begun += _checksum_kind(entry.details)
        fields.append(f"<Upload>{key}{begun}{OWNER}<StorageClass>STANDARD</StorageClass></Upload>")
    return xml_response(document("ListMultipartUploadsResult", "".join(fields)))


# --- parts in answers -------------------------------------------------------------------------------------


def _part_checksums(part: PartStat) -> list[tuple[bytes, bytes]]:
    return [(HEADERS[Algorithm(name)], checksums.encoded(digest).encode()) for name, digest in part.checksums.items()]


def _checksum_kind(details: Mapping[str, str]) -> str:
    """Return the checksum that an upload was begun with; "" for none."""
    if ALGORITHM not in details:
        return ""
    return element("ChecksumAlgorithm", details[ALGORITHM]) + element("ChecksumType", details[TYPE])


def _listed_part(part: PartStat) -> str:
    sums = [element(ELEMENTS[Algorithm(name)], checksums.encoded(digest)) for name, digest in part.checksums.items()]
    fields = [
        element("PartNumber", part.number),
        element("LastModified", iso_time(part.mtime_ns)),
        element("ETag", f'"{part.etag.hex()}"'),
        element("Size", part.size_bytes),
        *sums,
    ]
    return f"<Part>{''.join(fields)}</Part>"


# --- parameters of requests ------------------------------------------------------------------------------


def _upload(call: Call) -> UploadName:
    return UploadName(call.bucket, call.key, _upload_id(call.parameter("uploadId")))


def _upload_id(text: str) -> bytes:
    try:
        upload = bytes.fromhex(text)
    except ValueError:
        upload = b""
    if len(upload) != 16:
        raise S3Error(404, "NoSuchUpload", "The specified upload does not exist.", details={"UploadId": text[:256]})
    return upload


def _upload_marker(text: str) -> bytes:
    try:
        return _upload_id(text)
    except S3Error:
        raise invalid_argument("Invalid uploadId marker", "upload-id-marker", text[:256]) from None


def _part_number(call: Call) -> int:
    number = _number(call, "partNumber", 0)
    if not 1 <= number <= S3_PARTS_MAX:
        raise bad_part_number(str(number))
    return number


def _number(call: Call, name: str, default: int) -> int:
    return whole_number(name, call.parameter(name), default)


def _copied_range(call: Call) -> tuple[int, int | None]:
    text = call.headers.get(b"x-amz-copy-source-range")
    if text is None:
        return 0, None
    match = _RANGE.fullmatch(text)
    if match is None or int(match[2]) < int(match[1]):
        raise invalid_argument(
            "The x-amz-copy-source-range value must be of the form bytes=first-last where first and last are the "
            "zero-based offsets of the first and last bytes to copy"
        )
    return int(match[1]), int(match[2]) - int(match[1]) + 1


def _etag_bytes(part: CompletedPart) -> bytes:
    try:
        etag = bytes.fromhex(part.etag)
    except ValueError:
        etag = b""
    if len(etag) != 16:
        raise S3Error(
            400,
            "InvalidPart",
            "One or more of the specified parts could not be found. The part might not have been uploaded, or the "
            "specified entity tag might not have matched the part's entity tag.",
        )
    return etag
