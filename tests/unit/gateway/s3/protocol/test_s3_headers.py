"""The lists of x-amz-* headers: each operation has one, and the page for users says the same."""

from __future__ import annotations

import re

import pytest

from gateway.s3.dispatch import OPERATIONS
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.headers import META, ONLY, UNDERSTOOD, check_headers
from gateway.s3.protocol.operation import Operation
from tests.style.source_tree import ROOT

PAGE = ROOT / "docs/s3.md"
SECTION = "## Headers that ask for something"


def refusal(operation: Operation, **headers: bytes) -> tuple[int, str]:
    """Return status and code for a request with these headers."""
    with pytest.raises(S3Error) as caught:
        check_headers(operation, {name.replace("_", "-").encode(): value for name, value in headers.items()})
    return caught.value.status, caught.value.code


def rows_of_the_page() -> list[tuple[list[str], list[str], str]]:
    """Return headers, operations and the rest of each row of the table."""
    section = PAGE.read_text().split(SECTION)[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`x-amz-.*?) \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", headers), operations.split(", "), said) for headers, operations, said in rows]


def test_every_operation_that_is_offered_has_a_list() -> None:
    assert OPERATIONS.keys() == UNDERSTOOD.keys()


def test_the_page_for_users_has_the_same_lists() -> None:
    shown: dict[Operation, set[bytes]] = {operation: set() for operation in Operation}
    for headers, names, _ in rows_of_the_page():
        for operation in Operation if names == ["every operation"] else map(Operation, names):
            shown[operation] |= {header.removesuffix("*").encode() for header in headers}
    assert shown == UNDERSTOOD


def test_the_page_for_users_names_the_values_that_change_nothing() -> None:
    said = {header: text for headers, _, text in rows_of_the_page() for header in headers}
    for header, values in ONLY.items():
        for value in values:
            assert f"`{value.decode()}`" in said[header.decode()], header


@pytest.mark.parametrize("operation", Operation)
def test_what_an_operation_does_not_know_is_refused(operation: Operation) -> None:
    assert refusal(operation, x_amz_unheard_of=b"1") == (501, "NotImplemented")
    assert refusal(operation, x_amz_expected_bucket_owner=b"111122223333") == (403, "AccessDenied")
    check_headers(operation, {b"x-amz-expected-bucket-owner": b"lake", b"x-amzn-trace-id": b"1", b"host": b""})
    for header in UNDERSTOOD[operation] & ONLY.keys():
        for value in ONLY[header]:
            check_headers(operation, {header: value})
        with pytest.raises(S3Error, match="not offered"):
            check_headers(operation, {header: b"odd"})
    if META not in UNDERSTOOD[operation]:
        assert refusal(operation, x_amz_meta_a=b"1") == (501, "NotImplemented")


def test_a_secret_in_a_refused_header_is_not_repeated() -> None:
    with pytest.raises(S3Error) as caught:
        check_headers(Operation.GET_OBJECT, {b"x-amz-server-side-encryption-customer-key": b"c2VjcmV0"})
    assert "c2VjcmV0" not in caught.value.message
