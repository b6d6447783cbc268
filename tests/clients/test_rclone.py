"""rclone."""

from __future__ import annotations

import json

from tests.clients.declared import Client, works
from tests.clients.gateway import DATED_NS, Gateway, dated_tree

CLIENT = Client("rclone", "debian", lacks=("conditions",), also="sync, check")


@works("put", "get", "ranges", "list", "delete", "buckets", "multipart", "copy", "metadata", "checksums", "presigned")
def test_folders_are_synchronised_checked_moved_and_purged(gateway: Gateway) -> None:
    said = gateway.shell(
        "rclone",
        """
        mkdir -p tree/sub; head -c 12000000 /dev/urandom > tree/big; echo small > tree/sub/small; : > tree/empty
        touch -d 2001-02-03T04:05:06Z tree/sub/small
        rclone mkdir lake:of-rclone-2
        rclone copy --s3-upload-cutoff 5M --s3-chunk-size 5M tree lake:of-rclone-2/tree
        rclone check --download tree lake:of-rclone-2/tree
        rclone check tree lake:of-rclone-2/tree
        rclone sync --dry-run tree lake:of-rclone-2/tree 2> second
        grep -q Skipped second && exit 1
        rclone copyto lake:of-rclone-2/tree/big lake:of-rclone-2/copied
        rclone moveto lake:of-rclone-2/copied lake:of-rclone-2/moved
        rclone cat --offset 4194300 --count 11 lake:of-rclone-2/moved | cmp - <(tail -c +4194301 tree/big | head -c 11)
        rclone rcat --s3-upload-cutoff 5M lake:of-rclone-2/piped < tree/big
        rclone cat lake:of-rclone-2/piped | cmp - tree/big
        rclone sync lake:of-rclone-2/tree back
        diff -r tree back
        rclone hashsum MD5 lake:of-rclone-2/tree/sub/small
        rclone lsjson -R lake:of-rclone-2
        curl -sS --fail-with-body "$(rclone link lake:of-rclone-2/tree/sub/small)"
        rclone delete lake:of-rclone-2/tree
        rclone lsf -R lake:of-rclone-2
        rclone purge lake:of-rclone-2
        """,
    )
    assert "2001-02-03T04:05:06" in said, "times are metadata"
    assert "\nsmall\nmoved\npiped\n" in said


@works("put", "get")
def test_nothing_moves_between_a_folder_and_what_lake_put_of_it(gateway: Gateway) -> None:
    tree = dated_tree(gateway, CLIENT.name)
    gateway.served.good("put", "-r", str(tree), "of-rclone/synced")
    said = gateway.shell(
        "rclone",
        """
        rclone sync -vv dated lake:of-rclone/synced 2>&1 | grep -c 'Unchanged skipping'
        rclone sync -vv lake:of-rclone/synced dated 2>&1 | grep -c 'Unchanged skipping'
        rclone sync -v dated lake:of-rclone/synced 2>&1 | grep -E 'Copied|Updated|Deleted' && exit 1
        rclone sync lake:of-rclone/synced dated-back
        rclone sync -v dated-back lake:of-rclone/synced 2>&1 | grep -E 'Copied|Updated|Deleted' && exit 1
        touch -d 2002-02-03T04:05:06.5Z dated/a
        rclone sync dated lake:of-rclone/synced
        """,
    )
    assert said.split()[-2:] == ["3", "3"]
    listed = json.loads(gateway.served.good("ls", "-r", "--json", "of-rclone/synced/").text)
    times = {entry["key"]: entry["mtime_ns"] for entry in listed["entries"]}
    assert times["synced/a"] == 1_012_709_106_500_000_000
    assert times["synced/sub/b"] == (gateway.folder / "of-rclone/dated-back/sub/b").stat().st_mtime_ns == DATED_NS


@works("virtual host")
def test_buckets_are_named_in_hosts_when_it_is_told_to(gateway: Gateway) -> None:
    said = gateway.shell(
        "rclone",
        """
        echo x | rclone rcat lake:of-rclone/by-host
        rclone --s3-force-path-style=false --dump headers lsf lake:of-rclone 2>&1
        """,
        by_host=True,
    )
    assert "Host: of-rclone.lake.test" in said
    assert "\nby-host\n" in said
