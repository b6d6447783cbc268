"""Ranges, conditions and dates, as S3 answers them."""

from __future__ import annotations

from email.utils import formatdate, parsedate_to_datetime

import pytest
from hypothesis import given, settings, strategies as st

from gateway.http.ranges import (
    ByteRange,
    Condition,
    NoRange,
    check_conditions,
    content_range,
    format_http_date,
    parse_http_date,
    range_holds,
    select_range,
)

BEFORE = b"Sun, 06 Nov 1994 08:49:36 GMT"
AT = b"Sun, 06 Nov 1994 08:49:37 GMT"
AFTER = b"Sun, 06 Nov 1994 08:49:38 GMT"
MODIFIED_S = 784111777.9


@pytest.mark.parametrize(
    ("value", "selected"),
    [
        (b"bytes=0-0", ByteRange(0, 1)),
        (b"bytes=2-5", ByteRange(2, 6)),
        (b"bytes=2-", ByteRange(2, 10)),
        (b"bytes=9-99", ByteRange(9, 10)),
        (b"bytes=0-", ByteRange(0, 10)),
        (b"bytes=-3", ByteRange(7, 10)),
        (b"bytes=-99", ByteRange(0, 10)),
        (b"Bytes=1-2", ByteRange(1, 3)),
        (b"bytes=10-", NoRange.UNSATISFIABLE),
        (b"bytes=10-20", NoRange.UNSATISFIABLE),
        (b"bytes=9999999999999999999-", NoRange.UNSATISFIABLE),
        (b"bytes=-0", NoRange.UNSATISFIABLE),
        (None, NoRange.WHOLE),
        (b"", NoRange.WHOLE),
        (b"bytes=", NoRange.WHOLE),
        (b"bytes=-", NoRange.WHOLE),
        (b"bytes=5-2", NoRange.WHOLE),
        (b"bytes=20-11", NoRange.WHOLE),
        (b"bytes=0-1,4-5", NoRange.WHOLE),
        (b"bytes=0-1, -1", NoRange.WHOLE),
        (b"bytes=a-b", NoRange.WHOLE),
        (b"bytes=--1", NoRange.WHOLE),
        (b"bytes=+1-2", NoRange.WHOLE),
        (b"items=0-1", NoRange.WHOLE),
        (b"0-1", NoRange.WHOLE),
        *(
            (spaced, NoRange.WHOLE)
            for spaced in (b"bytes =1-2", b"bytes= 1-2", b"bytes=1 -2", b"bytes=1- 2", b"bytes=\t-2")
        ),
    ],
)
def test_a_range_of_ten_bytes(value: bytes | None, selected: ByteRange | NoRange) -> None:
    assert select_range(value, 10) == selected


@pytest.mark.parametrize("value", [b"bytes=0-", b"bytes=0-0", b"bytes=1-2", b"bytes=-0"])
def test_an_empty_object_satisfies_no_range_of_places(value: bytes) -> None:
    assert select_range(value, 0) is NoRange.UNSATISFIABLE


@pytest.mark.parametrize("value", [b"bytes=-1", b"bytes=-5", b"bytes=-9999999999999999999"])
def test_the_last_bytes_of_an_empty_object_are_the_whole_of_it(value: bytes) -> None:
    assert select_range(value, 0) is NoRange.WHOLE


def test_content_range_names_the_last_byte_and_the_size() -> None:
    assert content_range(ByteRange(2, 6), 10) == "bytes 2-5/10"
    assert content_range(NoRange.UNSATISFIABLE, 10) == "bytes */10"


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_a_range_selects_what_a_slice_does(first: int, length: int, size: int) -> None:
    content = bytes(range(size))
    selected = select_range(b"bytes=%d-%d" % (first, first + length), size)
    if isinstance(selected, ByteRange):
        assert content[selected.first : selected.stop] == content[first : first + length + 1] != b""
    else:
        assert content[first : first + length + 1] == b""


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ({}, Condition.PROCEED),
        ({b"if-match": b'"tag"'}, Condition.PROCEED),
        ({b"if-match": b"tag"}, Condition.PROCEED),
        ({b"if-match": b"*"}, Condition.PROCEED),
        ({b"if-match": b'"other", "tag"'}, Condition.PROCEED),
        ({b"if-match": b'"other"'}, Condition.FAILED),
        ({b"if-match": b""}, Condition.FAILED),
        ({b"if-unmodified-since": AT}, Condition.PROCEED),
        ({b"if-unmodified-since": AFTER}, Condition.PROCEED),
        ({b"if-unmodified-since": BEFORE}, Condition.FAILED),
        ({b"if-unmodified-since": b"yesterday"}, Condition.PROCEED),
        ({b"if-match": b'"tag"', b"if-unmodified-since": BEFORE}, Condition.PROCEED),
        ({b"if-match": b'"other"', b"if-unmodified-since": AFTER}, Condition.FAILED),
        ({b"if-none-match": b'"tag"'}, Condition.NOT_MODIFIED),
        ({b"if-none-match": b'W/"tag"'}, Condition.NOT_MODIFIED),
        ({b"if-none-match": b"*"}, Condition.NOT_MODIFIED),
        ({b"if-none-match": b'"other"'}, Condition.PROCEED),
        ({b"if-modified-since": BEFORE}, Condition.PROCEED),
        ({b"if-modified-since": AT}, Condition.NOT_MODIFIED),
        ({b"if-modified-since": AFTER}, Condition.NOT_MODIFIED),
        ({b"if-modified-since": b""}, Condition.PROCEED),
        ({b"if-none-match": b'"tag"', b"if-modified-since": BEFORE}, Condition.NOT_MODIFIED),
        ({b"if-none-match": b'"other"', b"if-modified-since": AFTER}, Condition.PROCEED),
        ({b"if-match": b'"other"', b"if-none-match": b'"tag"'}, Condition.FAILED),
        ({b"if-match": b'"tag"', b"if-none-match": b'"tag"'}, Condition.NOT_MODIFIED),
    ],
)
def test_conditions_are_combined_as_s3_documents(headers: dict[bytes, bytes], outcome: Condition) -> None:
    assert check_conditions(headers, "tag", MODIFIED_S) is outcome
    of_source = {b"x-amz-copy-source-" + name: value for name, value in headers.items()}
    assert check_conditions(of_source, "tag", MODIFIED_S, b"x-amz-copy-source-") is outcome
    assert check_conditions(of_source, "tag", MODIFIED_S) is Condition.PROCEED


@pytest.mark.parametrize(
    ("if_range", "holds"),
    [(None, True), (b'"tag"', True), (b'"other"', False), (b'W/"tag"', False), (AT, True), (AFTER, False)],
)
def test_a_range_is_served_only_of_the_object_that_if_range_names(if_range: bytes | None, holds: bool) -> None:
    assert range_holds(if_range, "tag", MODIFIED_S) is holds


@pytest.mark.parametrize("text", [AT, b"Sunday, 06-Nov-94 08:49:37 GMT", b"Sun Nov  6 08:49:37 1994"])
def test_the_three_forms_of_a_date_are_one_time(text: bytes) -> None:
    assert parse_http_date(text) == 784111777


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"784111777",
        b"Sun, 06 Nov 1994 08:49:37",
        b"Sun, 06 Nov 1994 08:49:37 CET",
        b"Sun, 31 Feb 1994 08:49:37 GMT",
        b"Sun, 00 Nov 1994 08:49:37 GMT",
        b"Sun, 06 Foo 1994 08:49:37 GMT",
        b"Sun, 06 Nov 1994 24:49:37 GMT",
        b"Sun, 06 Nov 1869 08:49:37 GMT",
        "Sun, 0\uff16 Nov 1994 08:49:37 GMT".encode(),
    ],
)
def test_what_is_no_date_is_none(text: bytes) -> None:
    assert parse_http_date(text) is None


@given(st.integers(0, 253402300799))
@settings(max_examples=200)
def test_dates_are_those_of_the_standard_library(epoch_s: int) -> None:
    text = format_http_date(epoch_s)
    assert text == formatdate(epoch_s, usegmt=True)
    assert parse_http_date(text.encode()) == epoch_s == parsedate_to_datetime(text).timestamp()


@given(st.binary(max_size=40))
@settings(max_examples=500)
def test_no_header_value_breaks_the_readers(value: bytes) -> None:
    assert select_range(value, 10) is not None
    parse_http_date(value)
    check_conditions({b"if-match": value, b"if-none-match": value}, "tag", 0)
