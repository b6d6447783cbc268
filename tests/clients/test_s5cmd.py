"""s5cmd."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("s5cmd", "s5cmd", lacks=("checksums", "conditions"), also="sync, mv, du, pipe")


@works("put", "get", "ranges", "list", "delete", "buckets", "multipart", "copy", "metadata", "presigned")
def test_folders_are_copied_in_parts_listed_moved_and_removed(gateway: Gateway) -> None:
    said = gateway.shell(
        "s5cmd",
        """
        mkdir -p tree/sub; head -c 12000000 /dev/urandom > tree/big; echo small > tree/sub/small; : > tree/empty
        s5cmd mb s3://of-s5cmd-2
        s5cmd cp -p 5 --metadata colour=blue tree/ s3://of-s5cmd-2/tree/
        s5cmd sync --size-only tree/ s3://of-s5cmd-2/tree/ > second
        test ! -s second
        s5cmd cp s3://of-s5cmd-2/tree/big s3://of-s5cmd-2/copied
        s5cmd mv s3://of-s5cmd-2/copied s3://of-s5cmd-2/moved
        s5cmd cp -p 5 's3://of-s5cmd-2/tree/*' back/
        diff -r tree back
        s5cmd cat s3://of-s5cmd-2/moved | cmp - tree/big
        s5cmd ls 's3://of-s5cmd-2/*' | awk '{ print $3, $4 }'
        s5cmd head s3://of-s5cmd-2/tree/big
        curl -sS --fail-with-body "$(s5cmd presign s3://of-s5cmd-2/tree/sub/small)"
        s5cmd rm 's3://of-s5cmd-2/*'
        s5cmd rb s3://of-s5cmd-2
        """,
    )
    assert "12000000 moved\n12000000 tree/big\n0 tree/empty\n6 tree/sub/small\n" in said
    assert '"colour":"blue"' in said.replace(" ", "").lower()
    assert "\nsmall\n" in said


@works("virtual host")
def test_a_host_name_as_endpoint_takes_buckets_in_hosts(gateway: Gateway) -> None:
    said = gateway.shell(
        "s5cmd", "echo x > x; s5cmd --log trace cp x s3://of-s5cmd/by-host; s5cmd ls 's3://of-s5cmd/by*'", by_host=True
    )
    assert "by-host" in said
