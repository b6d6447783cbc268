"""The whole of a completed upload: its size and checksum, compared with those that the client states.

Rules kept here:
- Everything is compared before the upload is completed; on a mismatch it is not completed.
- A stated checksum that cannot be compared, because parts were sent without one, is refused, never ignored: that of the
  whole, and that of a part.
- An upload that was begun with an algorithm takes no part with the checksum of another.
- The checksum of the whole is computed from the parts' and kept, if the upload was begun with an algorithm or the
  completion states one: of all bytes (FULL_OBJECT) or of the parts' digests (COMPOSITE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.s3.protocol import checksums
from gateway.s3.protocol.attributes import kept_composite
from gateway.s3.protocol.bodies import CompletedPart
from gateway.s3.protocol.checksums import HEADERS, Algorithm
from gateway.s3.protocol.errors import S3Error, invalid_argument
from gateway.s3.request.call import Call
from lakefs.errors import UploadNotFound
from lakefs.lake.multipart import UploadName, list_parts
from lakefs.wire.messages import PartStat

ALGORITHM: Final = "checksum-algorithm"
TYPE: Final = "checksum-type"
_FULL: Final = "FULL_OBJECT"
_COMPOSITE: Final = "COMPOSITE"
_SIZE: Final = b"x-amz-mp-object-size"
_SIZE_DIGITS_MAX: Final = 18


def checksum_details(call: Call) -> dict[str, str]:
    """Return the details that an upload is begun with: ALGORITHM and TYPE, or none.  S3Error if S3 has no such pair."""
    named, kind = call.header(b"x-amz-checksum-algorithm"), call.header(b"x-amz-checksum-type").upper()
    if not named:
        if kind:
            raise _invalid("x-amz-checksum-type needs x-amz-checksum-algorithm beside it")
        return {}
    algorithm = checksums.algorithm_named(named)
    kind = kind or _default_type(algorithm)
    _check_type(algorithm, kind)
    return {ALGORITHM: algorithm.value, TYPE: kind}


def part_algorithm(call: Call, details: Mapping[str, str]) -> Algorithm | None:
    """Return the algorithm that an upload was begun with; None if with none.  S3Error for a part of another."""
    begun = _begun_with(details)
    expected = checksums.expected_checksum(call.headers)
    sent = expected.algorithm if expected else checksums.announced_trailer(call.headers)
    if begun and sent and sent is not begun:
        raise _invalid(
            f"Checksum Type mismatch occurred, expected checksum Type: {begun.value.lower()}, "
            f"actual checksum Type: {sent.value.lower()}"
        )
    return begun


async def checked_whole(call: Call, upload: UploadName, wanted: Sequence[CompletedPart]) -> dict[str, bytes]:
    """Return the checksum of the whole to keep; S3Error if a part, or the whole, differs from the client's values."""
    stated = _stated_algorithm(call)
    has_checksums = stated is not None or any(part.checksums for part in wanted)
    try:
        details, found = await _listed(call, upload, everything=has_checksums or _SIZE in call.headers)
    except UploadNotFound:
        return {}  # it may have been completed before: the store decides
    for part in wanted:
        stored = found[part.number].checksums if part.number in found else None
        for algorithm, digest in part.checksums.items():
            if stored is not None and stored.get(algorithm.value) != digest:
                raise S3Error(
                    400,
                    "InvalidPart",
                    f"The {algorithm.value} of part {part.number} is not that of its upload, or it came without one.",
                )
    parts = [found[part.number] for part in wanted if part.number in found]
    if _SIZE in call.headers and len(parts) == len(wanted):  # else the store reports the missing part
        check_size(call, sum(part.size_bytes for part in parts))
    agreed = _agreed_algorithm(details, stated)
    kind = _agreed_type(call, details, agreed)
    return {} if agreed is None else _combined(call, agreed, kind, parts)


def check_size(call: Call, size_bytes: int) -> None:
    """Raise S3Error if x-amz-mp-object-size is sent and is not the size of the whole."""
    text = call.header(_SIZE)
    if not text:
        return
    if not (text.isascii() and text.isdigit() and len(text) <= _SIZE_DIGITS_MAX):
        raise invalid_argument("x-amz-mp-object-size is not a number of bytes", _SIZE.decode(), text[:64])
    if int(text) != size_bytes:
        raise _invalid(f"the parts add up to {size_bytes} bytes, not to the {text} of x-amz-mp-object-size")


def _stated_algorithm(call: Call) -> Algorithm | None:
    stated = [algorithm for algorithm in Algorithm if HEADERS[algorithm] in call.headers]
    if len(stated) > 1:
        raise checksums.several()
    return stated[0] if stated else None


def _agreed_algorithm(details: Mapping[str, str], stated: Algorithm | None) -> Algorithm | None:
    begun = _begun_with(details)
    if begun and stated and begun is not stated:
        raise _invalid(f"the upload was begun with {begun.value}; the checksum of the whole is {stated.value}")
    return begun or stated


def _begun_with(details: Mapping[str, str]) -> Algorithm | None:
    return Algorithm(details[ALGORITHM]) if ALGORITHM in details else None


def _agreed_type(call: Call, details: Mapping[str, str], algorithm: Algorithm | None) -> str:
    """Return the type of the whole's checksum; without an algorithm it is FULL_OBJECT, as S3 has it."""
    stated = call.header(b"x-amz-checksum-type").upper()
    kind = (details.get(TYPE) or stated or _default_type(algorithm)) if algorithm else _FULL
    if stated and stated != kind:
        raise S3Error(400, "BadDigest", f"the checksum type of the upload is {kind}, not {stated[:64]}")
    if algorithm:
        _check_type(algorithm, kind)
    return kind


def _default_type(algorithm: Algorithm) -> str:
    return _FULL if algorithm is Algorithm.CRC64NVME else _COMPOSITE


def _check_type(algorithm: Algorithm, kind: str) -> None:
    """Raise S3Error if S3 does not have that type for the algorithm."""
    if kind == _FULL:
        checksums.full_object(algorithm, ())
    elif kind == _COMPOSITE:
        checksums.composite(algorithm, ())
    else:
        raise invalid_argument("Value for x-amz-checksum-type header is invalid.", "x-amz-checksum-type", kind[:64])


async def _listed(call: Call, upload: UploadName, *, everything: bool) -> tuple[dict[str, str], dict[int, PartStat]]:
    """Return the upload's details, and its parts by number; only one page if nothing is compared."""
    found: dict[int, PartStat] = {}
    after = 0
    while True:
        page = await call.lakes.driver.run(list_parts(upload, after=after))
        found.update((part.number, part) for part in page.parts)
        after = page.next_after
        if not after or not (everything or ALGORITHM in page.upload.details):
            return page.upload.details, found


def _combined(call: Call, algorithm: Algorithm, kind: str, parts: Sequence[PartStat]) -> dict[str, bytes]:
    expected = call.headers.get(HEADERS[algorithm])
    known = [(part.checksums[algorithm.value], part.size_bytes) for part in parts if algorithm.value in part.checksums]
    if len(known) < len(parts):  # a copied part, or one sent without: no checksum of its bytes was computed
        if expected is not None:
            raise _invalid(
                f"the {algorithm.value} of the whole cannot be compared: parts were copied, or came without theirs; "
                "complete the upload without it"
            )
        return {}
    if kind == _COMPOSITE:
        text = checksums.composite(algorithm, [digest for digest, _ in known])
        if expected is not None and expected.decode("latin-1") != text:
            raise checksums.mismatch(algorithm.value)
        return kept_composite(algorithm, text)
    digest = checksums.full_object(algorithm, known)
    if expected is not None and checksums.decoded(algorithm, expected) != digest:
        raise checksums.mismatch(algorithm.value)
    return {algorithm.value: digest}


def _invalid(message: str) -> S3Error:
    return S3Error(400, "InvalidRequest", message)
