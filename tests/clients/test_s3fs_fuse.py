"""s3fs-fuse: a bucket as a folder."""

from __future__ import annotations

import pytest

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway, bucket_of
from tests.clients.mounting import GIT, PARTS, TAR

pytestmark = pytest.mark.fuse

CLIENT = Client(
    "s3fs-fuse",
    "debian",
    lacks=("buckets", "checksums", "conditions", "presigned", "virtual host"),
    also="`tar`, `git clone`",
)


@works("get", "ranges")
def test_parts_and_all_of_what_another_client_put_are_read(gateway: Gateway) -> None:
    gateway.shell("s3fs-fuse", PARTS.replace("BUCKET", bucket_of("s3fs-fuse")))


@works("put", "list", "delete", "multipart", "copy", "metadata")
def test_an_archive_is_written_extracted_compared_and_removed(gateway: Gateway) -> None:
    gateway.shell("s3fs-fuse", TAR)


def test_a_repository_is_cloned_into_it_and_out_of_it(gateway: Gateway) -> None:
    gateway.shell("s3fs-fuse", GIT)
