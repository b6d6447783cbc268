"""Checksums of S3 bodies: MD5 and the five x-amz-checksum-* algorithms, incremental, combined, as headers.  Pure.

- Values on the wire are base64 of the big-endian digest.
- A multipart object's checksum is FULL_OBJECT (a CRC of all bytes, computed from the parts' CRCs and lengths) or
  COMPOSITE (the algorithm over the parts' digests, written with `-N`).  S3 defines full objects for the CRCs only, and
  composites for all but CRC64NVME.
- `update` of large pieces releases the interpreter's lock, in hashlib, isal and awscrt (whose CRC32 is the slow one).

CRC64NVME: polynomial 0xAD93D23594C93659, reflected, all ones in and out (NVM Express NVM Command Set 1.0d, 5.2.1.3.4).
"""

from __future__ import annotations

import binascii
import enum
import hashlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from awscrt import checksums as crt
from isal import isal_zlib

from gateway.s3.protocol.errors import S3Error

Piece = bytes | bytearray | memoryview


class Algorithm(enum.Enum):
    """A checksum of S3, by its name in x-amz-sdk-checksum-algorithm and in XML."""

    CRC32 = "CRC32"
    CRC32C = "CRC32C"
    CRC64NVME = "CRC64NVME"
    SHA1 = "SHA1"
    SHA256 = "SHA256"


class Running(Protocol):
    """A digest in the making, as hashlib's are."""

    def update(self, data: Piece, /) -> None:
        """Take more bytes; they are not kept."""

    def digest(self) -> bytes:
        """Return the digest of all bytes so far; big-endian."""


class _Crc:
    """A CRC in the making."""

    __slots__ = ("_bytes", "_step", "_value")

    def __init__(self, step: Callable[[Piece, int], int], digest_bytes: int) -> None:
        self._step = step
        self._bytes = digest_bytes
        self._value = 0

    def update(self, data: Piece, /) -> None:
        self._value = self._step(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._bytes, "big")


DIGEST_BYTES: Final = {
    Algorithm.CRC32: 4,
    Algorithm.CRC32C: 4,
    Algorithm.CRC64NVME: 8,
    Algorithm.SHA1: 20,
    Algorithm.SHA256: 32,
}
HEADERS: Final = {algorithm: f"x-amz-checksum-{algorithm.value.lower()}".encode() for algorithm in Algorithm}
"""Name of the request's header or trailer, and of the answer's."""
ELEMENTS: Final = {algorithm: f"Checksum{algorithm.value}" for algorithm in Algorithm}
"""Name of the element in XML."""
_BY_HEADER: Final = {header: algorithm for algorithm, header in HEADERS.items()}
_PREFIX: Final = b"x-amz-checksum-"
_NOT_VALUES: Final = (b"x-amz-checksum-mode", b"x-amz-checksum-type", b"x-amz-checksum-algorithm")
_COMBINE: Final[Mapping[Algorithm, Callable[[int, int, int], int]]] = {
    Algorithm.CRC32: crt.combine_crc32,
    Algorithm.CRC32C: crt.combine_crc32c,
    Algorithm.CRC64NVME: crt.combine_crc64nvme,
}


def start(algorithm: Algorithm) -> Running:
    """Return a new digest of no bytes."""
    match algorithm:
        case Algorithm.CRC32:
            return _Crc(isal_zlib.crc32, 4)
        case Algorithm.CRC32C:
            return _Crc(crt.crc32c, 4)
        case Algorithm.CRC64NVME:
            return _Crc(crt.crc64nvme, 8)
        case Algorithm.SHA1:
            return hashlib.sha1(usedforsecurity=False)
        case Algorithm.SHA256:
            return hashlib.sha256()


def start_md5() -> Running:
    """Return a new MD5, for ETag and Content-MD5."""
    return hashlib.md5(usedforsecurity=False)


class Expected(NamedTuple):
    """The digest of the body that a client sent."""

    algorithm: Algorithm
    digest: bytes


def expected_checksum(headers: Mapping[bytes, bytes]) -> Expected | None:
    """Return the x-amz-checksum-* value of a request's headers or trailers; None without one.

    S3Error for more than one, an unknown algorithm, or no base64 of the right length.
    """
    names = [name for name in headers if name.startswith(_PREFIX) and name not in _NOT_VALUES]
    if not names:
        return None
    if len(names) > 1:
        raise several()
    algorithm = _BY_HEADER.get(names[0])
    if algorithm is None:
        raise _invalid(f"{names[0].decode('latin-1')} is not a checksum that S3 has")
    return Expected(algorithm, decoded(algorithm, headers[names[0]]))


def several() -> S3Error:
    """Return a 400 for more than one checksum."""
    return _invalid("Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed.")


def check_algorithm(headers: Mapping[bytes, bytes]) -> None:
    """Raise S3Error if x-amz-sdk-checksum-algorithm names a checksum that is in no header and no trailer."""
    named = headers.get(b"x-amz-sdk-checksum-algorithm")
    if not named:
        return
    algorithm = algorithm_named(named.decode("latin-1"))
    if HEADERS[algorithm] not in headers and announced_trailer(headers) is not algorithm:
        raise _invalid(
            f"x-amz-sdk-checksum-algorithm is {algorithm.value}, but neither {HEADERS[algorithm].decode()} nor an "
            "x-amz-trailer for it was found"
        )


def announced_trailer(headers: Mapping[bytes, bytes]) -> Algorithm | None:
    """Return the algorithm that x-amz-trailer announces, to compute it while the body is received.

    S3Error for anything but one checksum: nothing else that a trailer says is understood.
    """
    names = [name for name in map(bytes.strip, headers.get(b"x-amz-trailer", b"").lower().split(b",")) if name]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _BY_HEADER:
        raise _invalid("The value specified in the x-amz-trailer header is not supported")
    return _BY_HEADER[names[0]]


def algorithm_named(name: str) -> Algorithm:
    """Return the algorithm of x-amz-checksum-algorithm or x-amz-sdk-checksum-algorithm, in any case.  S3Error."""
    try:
        return Algorithm(name.upper())
    except ValueError:
        raise _invalid(
            "Checksum algorithm provided is unsupported. Please try again with any of the valid types: "
            f"[{', '.join(algorithm.value for algorithm in Algorithm)}]"
        ) from None


def expected_md5(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the digest of Content-MD5; S3Error InvalidDigest if it is malformed."""
    text = headers.get(b"content-md5")
    if text is None:
        return None
    digest = _from_base64(text)
    if digest is None or len(digest) != 16:
        raise S3Error(400, "InvalidDigest", "The Content-MD5 you specified is not valid.")
    return digest


def decoded(algorithm: Algorithm, text: bytes) -> bytes:
    """Decode the base64 of a digest.  S3Error."""
    digest = _from_base64(text)
    if digest is None or len(digest) != DIGEST_BYTES[algorithm]:
        raise _invalid(f"Value for {HEADERS[algorithm].decode()} header is invalid.")
    return digest


def encoded(digest: bytes) -> str:
    """Encode a digest to base64, as headers and XML carry it."""
    return b64encode(digest).decode()


def mismatch(what: str) -> S3Error:
    """Return a 400 BadDigest; `what` is an algorithm's name or Content-MD5."""
    return S3Error(
        400, "BadDigest", f"The {what} you specified did not match the calculated checksum; nothing was stored."
    )


def full_object(algorithm: Algorithm, parts: Iterable[tuple[bytes, int]]) -> bytes:
    """Combine the parts' (digest, length), in order, to the CRC of all bytes; without parts, that of no bytes.

    S3Error for an algorithm that cannot be combined.
    """
    combine = _COMBINE.get(algorithm)
    if combine is None:
        raise _invalid(f"The FULL_OBJECT checksum type cannot be used with the {algorithm.value} checksum algorithm.")
    total = 0
    for digest, length_bytes in parts:
        total = combine(total, int.from_bytes(digest, "big"), length_bytes)
    return total.to_bytes(DIGEST_BYTES[algorithm], "big")


def composite(algorithm: Algorithm, digests: Sequence[bytes]) -> str:
    """Return `base64-N`: the algorithm over the parts' digests.  S3Error for CRC64NVME, which has none."""
    if algorithm is Algorithm.CRC64NVME:
        raise _invalid("The COMPOSITE checksum type cannot be used with the CRC64NVME checksum algorithm.")
    running = start(algorithm)
    running.update(b"".join(digests))
    return f"{encoded(running.digest())}-{len(digests)}"


def _from_base64(text: bytes) -> bytes | None:
    try:
        digest = binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        return None
    return digest if b64encode(digest) == text else None


def _invalid(message: str) -> S3Error:
    return S3Error(400, "InvalidRequest", message)
