"""Errors of the product as S3's errors."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from gateway.s3.protocol.errors import TABLE, S3Error, error_body, from_lake
from lakefs import errors as lake


def _classes(root: type[lake.LakeError]) -> set[type[lake.LakeError]]:
    return {root}.union(*(_classes(child) for child in root.__subclasses__() if child.__module__ == lake.__name__))


def test_every_error_of_the_store_has_its_row() -> None:
    assert _classes(lake.LakeError) == set(TABLE)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (lake.BucketNotFound("no bucket"), 404, "NoSuchBucket"),
        (lake.KeyNotFound("no key"), 404, "NoSuchKey"),
        (lake.PreconditionFailed("changed"), 412, "PreconditionFailed"),
        (lake.EngineBusy("busy"), 503, "SlowDown"),
    ],
)
def test_what_a_client_can_act_on_keeps_its_message(error: lake.LakeError, status: int, code: str) -> None:
    found = from_lake(error, "/b/k")
    assert (found.status, found.code, found.message, found.resource) == (status, code, error.message, "/b/k")


def test_damage_and_bugs_say_nothing_of_the_inside() -> None:
    for kind in (lake.ChunkDamaged, lake.ChunkNotFound, lake.InternalError):
        found = from_lake(kind("segment 7 at /var/lib/lake"))
        assert (found.status, found.code) == (500, "InternalError")
        assert "segment" not in found.message


def test_a_new_error_is_what_its_parent_is() -> None:
    class Novel(lake.KeyNotFound):
        """An error that the table does not have."""

    assert from_lake(Novel("gone")).code == "NoSuchKey"


def test_the_body_carries_what_clients_read() -> None:
    error = S3Error(404, "NoSuchKey", "no <such> & key", '/b/a\x01"k', details={"Key": "k"})
    body = error_body(error, "REQ", "HOST")
    assert body.startswith(b'<?xml version="1.0" encoding="UTF-8"?>\n<Error>')
    assert b"<Resource>/b/a&#x1;&quot;k</Resource>" in body
    root = ElementTree.fromstring(body.replace(b"&#x1;", b"?"))
    assert {child.tag: child.text for child in root} == {
        "Code": "NoSuchKey",
        "Message": "no <such> & key",
        "Key": "k",
        "Resource": '/b/a?"k',
        "RequestId": "REQ",
        "HostId": "HOST",
    }
