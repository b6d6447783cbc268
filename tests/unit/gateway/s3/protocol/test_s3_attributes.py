"""Tags within S3's limits, from lists and from headers; modification times as metadata."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from gateway.s3.protocol.attributes import (
    attributes_of,
    checked_tags,
    mtime_text,
    object_headers,
    read_mtime,
    tags_of_copy,
    tags_of_header,
)
from gateway.s3.protocol.errors import S3Error
from lakefs.wire.messages import ObjectStat


@pytest.mark.parametrize(
    ("tags", "code"),
    [
        ([(str(number), "") for number in range(11)], "BadRequest"),
        ([("a", "1"), ("a", "2")], "InvalidTag"),
        ([("", "1")], "InvalidTag"),
        ([("k" * 129, "")], "InvalidTag"),
        ([("k", "v" * 257)], "InvalidTag"),
        ([("\U00010330" * 65, "")], "InvalidTag"),
        ([("k", "a\nb")], "InvalidTag"),
        ([("a&b", "")], "InvalidTag"),
        ([("k", "\U0001f642")], "InvalidTag"),
        ([("aws:mine", "")], "InvalidTag"),
    ],
)
def test_tags_are_few_short_different_and_of_plain_characters(tags: list[tuple[str, str]], code: str) -> None:
    with pytest.raises(S3Error) as caught:
        checked_tags(tags)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_letters_of_every_script_spaces_and_some_signs_are_tags() -> None:
    tags = [("k" * 128, "v" * 256), ("Größe 漢字 ٣", "a+b-c=d.e_f:g/h@i"), ("\U00010330" * 64, "")]
    assert checked_tags(tags) == dict(tags)


def test_a_header_has_tags_as_a_query_has_parameters() -> None:
    assert tags_of_header({}) == {}
    assert tags_of_header({b"x-amz-tagging": b"a=1&b+c=%C3%A9&d"}) == {"a": "1", "b c": "é", "d": ""}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"a=1&a=2", "InvalidArgument"),
        (b"a=%zz", "InvalidArgument"),
        (b"a=%ff", "InvalidArgument"),
        (b"=1", "InvalidTag"),
        (b"&".join(b"%d=" % number for number in range(11)), "BadRequest"),
    ],
)
def test_a_header_of_other_text_is_refused(value: bytes, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        tags_of_header({b"x-amz-tagging": value})
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("gzip", "gzip"),
        ("deflate, gzip", "deflate, gzip"),
        ("deflate ,gzip;q=1", "deflate ,gzip;q=1"),
        ("gzip, aws-chunked", "gzip"),
        ("aws-chunked, gzip", "gzip"),
        ("gzip,aws-chunked,br", "gzip,br"),
        ("deflate, AWS-Chunked , gzip", "deflate, gzip"),
        ("aws-chunked", None),
        ("aws-chunked,aws-chunked", None),
        ("aws-chunked, aws-chunked", None),
        ("not-aws-chunked", "not-aws-chunked"),
    ],
)
def test_a_content_encoding_comes_back_as_sent_less_aws_chunked(sent: str, kept: str | None) -> None:
    attributes = attributes_of({b"content-encoding": sent.encode()})
    assert attributes.headers.get("Content-Encoding") == kept


def test_a_copy_keeps_tags_unless_it_replaces_them() -> None:
    given = {b"x-amz-tagging": b"a=1"}
    assert tags_of_copy(given) is None
    assert tags_of_copy({**given, b"x-amz-tagging-directive": b"REPLACE"}) == {"a": "1"}
    assert tags_of_copy({b"x-amz-tagging-directive": b"REPLACE"}) == {}
    with pytest.raises(S3Error):
        tags_of_copy({b"x-amz-tagging-directive": b"MERGE"})


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("1354040105.123456789", 1_354_040_105_123_456_789),
        ("1354040105", 1_354_040_105 * 10**9),
        ("1354040105.5", 1_354_040_105_500_000_000),
        ("0", 0),
        ("-0.000000001", -1),
        ("-12.25", -12_250_000_000),
    ],
)
def test_a_modification_time_is_read_and_written_as_rclone_does(text: str, time_ns: int) -> None:
    assert read_mtime(text) == time_ns
    assert mtime_text(time_ns) == text


@pytest.mark.parametrize("text", ["", ".", ".5", "1,5", "+1", "1e3", "1354040105 ", "\u0661", "9223372037", "1" * 40])
def test_what_is_no_modification_time_is_not_taken_for_one(text: str) -> None:
    assert read_mtime(text) is None


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_every_time_of_the_store_comes_back(time_ns: int) -> None:
    assert read_mtime(mtime_text(time_ns)) == time_ns


def test_a_time_that_was_changed_since_is_shown_in_the_place_of_the_one_that_was_sent() -> None:
    sent = {"mtime": "5.50", "a": "1"}
    stat = ObjectStat("b", "k", 2, 1, 0, "e", 5_500_000_000, user_metadata=sent, bound_ns=7)
    assert (b"x-amz-meta-mtime", b"5.50") in object_headers(stat)
    touched = msgspec.structs.replace(stat, mtime_ns=6_000_000_000)
    assert (b"x-amz-meta-mtime", b"6") in object_headers(touched)
    plain = msgspec.structs.replace(stat, user_metadata={}, bound_ns=0)
    assert not any(b"mtime" in name for name, _ in object_headers(plain))
