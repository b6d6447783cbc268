"""rclone mount: a bucket as a folder."""

from __future__ import annotations

import pytest

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway, bucket_of
from tests.clients.mounting import GIT, PARTS, TAR

pytestmark = pytest.mark.fuse

CLIENT = Client(
    "rclone mount",
    "debian",
    lacks=("buckets", "multipart", "checksums", "conditions", "presigned", "virtual host"),
    also="`tar`, `git clone`",
)


@works("get", "ranges")
def test_parts_and_all_of_what_another_client_put_are_read(gateway: Gateway) -> None:
    gateway.shell("rclone mount", PARTS.replace("BUCKET", bucket_of("rclone mount")))


@works("put", "list", "delete", "copy", "metadata")
def test_an_archive_is_written_extracted_compared_and_removed(gateway: Gateway) -> None:
    gateway.shell("rclone mount", TAR)


def test_a_repository_is_cloned_into_it_and_out_of_it(gateway: Gateway) -> None:
    gateway.shell("rclone mount", GIT)
