"""Names of buckets: those that a store can hold, and those that a new bucket may have."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lakefs.errors import InvalidName
from lakefs.names import broken_rule, check_new_bucket_name, is_bucket_name
from tests.old_buckets import OLD_NAMES


@pytest.mark.parametrize(
    "name", ["models", "abc", "a.b-c", "x" * 63, "123", "2026-11", "a-.b", "1.2.3", "1.2.3.4.5", "mrap", "x-an"]
)
def test_names_that_s3_takes_are_taken(name: str) -> None:
    check_new_bucket_name(name)
    assert is_bucket_name(name)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "it has 0 characters; use 3 to 63"),
        ("b", "it has 1 characters; use 3 to 63"),
        ("bb", "it has 2 characters; use 3 to 63"),
        ("x" * 64, "it has 64 characters; use 3 to 63"),
        ("a/b", "use lower-case letters, digits, '.' and '-' only"),
        ("Models", "use lower-case letters, digits, '.' and '-' only"),
        ("my_models", "use lower-case letters, digits, '.' and '-' only"),
        ("a b", "use lower-case letters, digits, '.' and '-' only"),
        ("modèles", "use lower-case letters, digits, '.' and '-' only"),
        ("abc\n", "use lower-case letters, digits, '.' and '-' only"),
        ("٣٣٣", "use lower-case letters, digits, '.' and '-' only"),
        ("ab\ud800", "use lower-case letters, digits, '.' and '-' only"),
        ("-abc", "begin and end it with a letter or a digit"),
        ("abc-", "begin and end it with a letter or a digit"),
        (".abc", "begin and end it with a letter or a digit"),
        ("abc.", "begin and end it with a letter or a digit"),
        ("a..b", "two dots must not follow each other"),
        ("192.168.5.4", "it must not look like an IP address"),
        ("999.1.1.1", "it must not look like an IP address"),
        ("xn--abc", "S3 reserves names that begin with 'xn--'"),
        ("sthree-abc", "S3 reserves names that begin with 'sthree-'"),
        ("sthree-configurator", "S3 reserves names that begin with 'sthree-'"),
        ("amzn-s3-demo-abc", "S3 reserves names that begin with 'amzn-s3-demo-'"),
        ("abc-s3alias", "S3 reserves names that end with '-s3alias'"),
        ("abc--ol-s3", "S3 reserves names that end with '--ol-s3'"),
        ("abc.mrap", "S3 reserves names that end with '.mrap'"),
        ("abc--usw2-az1--x-s3", "S3 reserves names that end with '--x-s3'"),
        ("abc--table-s3", "S3 reserves names that end with '--table-s3'"),
    ],
)
def test_other_names_are_refused_with_the_rule_and_an_example(name: str, rule: str) -> None:
    with pytest.raises(InvalidName) as refusal:
        check_new_bucket_name(name)
    assert refusal.value.message.endswith(f" is not valid: {rule}; for example: my-models")
    refusal.value.message.encode()
    refusal.value.subject.encode()


@pytest.mark.parametrize("name", [*OLD_NAMES, "a", "0", "A", "a.b_c-D", "x" * 63])
def test_a_store_can_hold_short_names_capitals_and_underscores(name: str) -> None:
    assert is_bucket_name(name)


@given(st.text(st.sampled_from("ab0.-_A/ \n"), max_size=8) | st.text(max_size=70))
def test_a_store_can_hold_every_name_that_a_new_bucket_may_have(name: str) -> None:
    assert is_bucket_name(name) or broken_rule(name)
