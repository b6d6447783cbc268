"""s3cmd."""

from __future__ import annotations

from tests.clients.declared import Client, refused, works
from tests.clients.gateway import Gateway

CLIENT = Client("s3cmd", "s3cmd", lacks=("ranges", "conditions"), also="sync, du, info, modify; ACLs are refused")


@works("put", "get", "list", "delete", "buckets", "multipart", "copy", "metadata", "checksums")
def test_folders_are_synchronised_copied_described_and_removed(gateway: Gateway) -> None:
    said = gateway.shell(
        "s3cmd",
        """
        s3() { s3cmd -q -c s3cfg "$@"; }
        mkdir -p tree/sub; head -c 12000000 /dev/urandom > tree/big; echo small > tree/sub/small; : > tree/empty
        s3 mb s3://of-s3cmd-2
        s3 --multipart-chunk-size-mb=5 sync tree/ s3://of-s3cmd-2/tree/
        s3cmd -c s3cfg sync tree/ s3://of-s3cmd-2/tree/ > second
        ! grep upload second
        s3 cp s3://of-s3cmd-2/tree/big s3://of-s3cmd-2/copied
        s3 mv s3://of-s3cmd-2/copied s3://of-s3cmd-2/moved
        s3 modify --add-header=x-amz-meta-colour:blue s3://of-s3cmd-2/moved
        s3 get s3://of-s3cmd-2/moved back; cmp back tree/big
        mkdir down; s3 sync s3://of-s3cmd-2/tree/ down/; diff -r tree down
        s3cmd -c s3cfg ls -r s3://of-s3cmd-2
        s3cmd -c s3cfg info s3://of-s3cmd-2/moved
        s3cmd -c s3cfg du s3://of-s3cmd-2
        s3 rb s3://of-s3cmd-2 2> refused && exit 1
        s3 del -r -f s3://of-s3cmd-2
        s3 rb s3://of-s3cmd-2
        """,
    )
    assert "s3://of-s3cmd-2/tree/sub/small" in said
    assert "x-amz-meta-colour: blue" in said
    assert "24000006" in said


@refused("presigned")
def test_its_urls_are_signed_with_version_2_and_refused(gateway: Gateway) -> None:
    said = gateway.shell(
        "s3cmd",
        """
        echo x > x; s3cmd -q -c s3cfg put x s3://of-s3cmd/x
        curl -s "$(s3cmd -c s3cfg signurl s3://of-s3cmd/x +60)"
        """,
    )
    assert "<Code>InvalidRequest</Code>" in said
    assert "AWS4-HMAC-SHA256" in said


@works("virtual host")
def test_a_place_for_the_bucket_in_the_host_is_filled(gateway: Gateway) -> None:
    said = gateway.shell(
        "s3cmd",
        """
        echo x > x
        proxy=${AWS_ENDPOINT_URL#http://}
        printf 'proxy_host = %s\\nproxy_port = %s\\n' "${proxy%:*}" "${proxy#*:}" >> s3cfg
        s3() { s3cmd -c s3cfg --host=lake.test --host-bucket='%(bucket)s.lake.test' "$@"; }
        s3 -d put x s3://of-s3cmd/by-host > said 2>&1; grep -q of-s3cmd.lake.test said
        s3 ls s3://of-s3cmd/by-host
        """,
    )
    assert said.endswith("s3://of-s3cmd/by-host\n")


def test_acls_are_refused(gateway: Gateway) -> None:
    said = gateway.shell("s3cmd", "s3cmd -c s3cfg setacl --acl-public s3://of-s3cmd 2>&1 || true")
    assert "501 (NotImplemented)" in said
