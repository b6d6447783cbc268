"""Checksums: known values, an independent bit-by-bit CRC, and combination over parts."""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64encode

import pytest
from hypothesis import given, settings, strategies as st

from gateway.s3.protocol import checksums
from gateway.s3.protocol.checksums import Algorithm
from gateway.s3.protocol.errors import S3Error

CRCS = [Algorithm.CRC32, Algorithm.CRC32C, Algorithm.CRC64NVME]
POLYNOMIALS = {Algorithm.CRC32: 0xEDB88320, Algorithm.CRC32C: 0x82F63B78, Algorithm.CRC64NVME: 0x9A6C9329AC4BC9B5}


def digest(algorithm: Algorithm, *pieces: bytes | memoryview) -> bytes:
    running = checksums.start(algorithm)
    for piece in pieces:
        running.update(piece)
    return running.digest()


def bit_by_bit(algorithm: Algorithm, content: bytes) -> bytes:
    """Return a reflected CRC with all ones in and out, from its definition."""
    ones = (1 << 8 * checksums.DIGEST_BYTES[algorithm]) - 1
    value = ones
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIALS[algorithm] if value & 1 else 0)
    return (value ^ ones).to_bytes(checksums.DIGEST_BYTES[algorithm], "big")


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Algorithm.CRC32, "cbf43926"),
        (Algorithm.CRC32C, "e3069283"),
        (Algorithm.CRC64NVME, "ae8b14860a799888"),
        (Algorithm.SHA1, hashlib.sha1(b"123456789").hexdigest()),
        (Algorithm.SHA256, hashlib.sha256(b"123456789").hexdigest()),
    ],
)
def test_the_check_value_of_each_algorithm(algorithm: Algorithm, expected: str) -> None:
    assert digest(algorithm, b"123456789").hex() == expected
    assert digest(algorithm, b"1234", b"", memoryview(b"_56789_")[1:-1]).hex() == expected


@given(st.sampled_from(CRCS), st.binary(max_size=300))
@settings(max_examples=100)
def test_a_crc_is_what_its_definition_says(algorithm: Algorithm, content: bytes) -> None:
    assert digest(algorithm, content) == bit_by_bit(algorithm, content)


@given(st.sampled_from(list(Algorithm)), st.binary(max_size=300), st.integers(0, 300))
@settings(max_examples=100)
def test_pieces_give_the_digest_of_the_whole(algorithm: Algorithm, content: bytes, cut: int) -> None:
    assert digest(algorithm, content[:cut], content[cut:]) == digest(algorithm, content)


@given(st.sampled_from(CRCS), st.lists(st.binary(max_size=100), max_size=5))
@settings(max_examples=100)
def test_the_parts_crcs_combine_to_the_objects(algorithm: Algorithm, parts: list[bytes]) -> None:
    combined = checksums.full_object(algorithm, ((digest(algorithm, part), len(part)) for part in parts))
    assert combined == digest(algorithm, b"".join(parts))


def test_a_large_piece_gives_what_another_library_says() -> None:
    content = bytes(range(256)) * 4096
    assert digest(Algorithm.CRC32, content) == zlib.crc32(content).to_bytes(4, "big")


def test_what_s3_does_not_define_is_refused() -> None:
    for algorithm in (Algorithm.SHA1, Algorithm.SHA256):
        with pytest.raises(S3Error):
            checksums.full_object(algorithm, [])
    with pytest.raises(S3Error):
        checksums.composite(Algorithm.CRC64NVME, [])


@pytest.mark.parametrize("algorithm", [Algorithm.CRC32, Algorithm.CRC32C, Algorithm.SHA1, Algorithm.SHA256])
def test_a_composite_is_the_digest_of_the_digests(algorithm: Algorithm) -> None:
    digests = [digest(algorithm, b"one"), digest(algorithm, b"two")]
    expected = b64encode(digest(algorithm, digests[0] + digests[1])).decode()
    assert checksums.composite(algorithm, digests) == f"{expected}-2"


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_header_is_read_as_it_is_written(algorithm: Algorithm) -> None:
    value = digest(algorithm, b"x")
    header = checksums.HEADERS[algorithm]
    assert header.decode() == f"x-amz-checksum-{algorithm.value.lower()}"
    headers = {header: checksums.encoded(value).encode(), b"x-amz-checksum-mode": b"ENABLED"}
    assert checksums.expected_checksum(headers) == (algorithm, value)
    assert checksums.announced_trailer({b"x-amz-trailer": header.upper()}) is algorithm
    assert checksums.algorithm_named(algorithm.value.lower()) is algorithm


def test_no_checksum_is_none() -> None:
    assert checksums.expected_checksum({b"x-amz-checksum-algorithm": b"CRC32"}) is None
    assert checksums.announced_trailer({b"x-amz-trailer": b""}) is None
    assert checksums.announced_trailer({}) is None
    assert checksums.expected_md5({}) is None


@pytest.mark.parametrize(
    "headers",
    [
        {b"x-amz-checksum-crc32": b"AAAAAA==", b"x-amz-checksum-sha1": b"AAAA"},
        {b"x-amz-checksum-crc32": b""},
        {b"x-amz-checksum-crc32": b"AAAA"},
        {b"x-amz-checksum-crc32": b"AAAAAAA="},
        {b"x-amz-checksum-crc32": b"AAAAAB=="},
        {b"x-amz-checksum-crc32": b" AAAAAA=="},
        {b"x-amz-checksum-crc32": b"00000000"},
        {b"x-amz-checksum-crc32": b"\xff"},
        {b"x-amz-checksum-crc99": b"AAAAAA=="},
        {b"x-amz-checksum-md5": b"AAAAAA=="},
    ],
)
def test_a_value_that_is_no_checksum_is_refused(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(S3Error) as caught:
        checksums.expected_checksum(headers)
    assert (caught.value.status, caught.value.code) == (400, "InvalidRequest")


def test_trailers_other_than_one_checksum_or_an_unknown_algorithm_are_refused() -> None:
    for value in (
        b"x-amz-checksum-crc32,x-amz-checksum-sha1",
        b"x-amz-checksum-crc32,x-amz-meta-a",
        b"x-amz-checksum-md5",
        b"x-amz-meta-a",
    ):
        with pytest.raises(S3Error):
            checksums.announced_trailer({b"x-amz-trailer": value})
    with pytest.raises(S3Error):
        checksums.algorithm_named("MD5")


def test_content_md5_is_sixteen_bytes() -> None:
    value = hashlib.md5(b"x").digest()
    assert checksums.expected_md5({b"content-md5": b64encode(value)}) == value
    for text in (b"", b"AAAA", value.hex().encode(), b"!" * 24):
        with pytest.raises(S3Error) as caught:
            checksums.expected_md5({b"content-md5": text})
        assert caught.value.code == "InvalidDigest"
