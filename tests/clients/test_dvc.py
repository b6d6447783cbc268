"""DVC: versions of data beside git, in a remote."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "dvc",
    "dvc",
    lacks=(
        "ranges",
        "buckets",
        "multipart",
        "copy",
        "metadata",
        "checksums",
        "conditions",
        "presigned",
        "virtual host",
    ),
    also="push, pull, gc",
)


@works("put", "get", "list", "delete")
def test_data_is_pushed_and_pulled_by_its_hash(gateway: Gateway) -> None:
    gateway.shell(
        "dvc",
        """
        mkdir data; head -c 9000000 /dev/urandom > data/big; echo small > data/small
        dvc add -q data
        dvc push -q
        cp -r data kept
        rm -rf data .dvc/cache
        dvc pull -q
        diff -r data kept
        echo other > data/small
        dvc add -q data
        dvc gc -q -w -c -f
        """,
    )
