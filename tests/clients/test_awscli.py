"""The aws command line: `aws s3` and `aws s3api`."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway, dated_tree

CLIENT = Client("aws cli", "awscli", also="sync, mv, s3api")
TREE = """
mkdir -p tree/sub
head -c 20000000 /dev/urandom > tree/big
echo small > tree/sub/small
: > tree/empty
"""


@works("put", "get", "list", "delete", "buckets", "multipart", "copy")
def test_folders_are_synchronised_both_ways_moved_and_removed(gateway: Gateway) -> None:
    said = gateway.shell(
        "aws cli",
        f"""
        {TREE}
        aws s3 mb s3://of-aws-cli-2
        aws s3 sync --no-progress tree s3://of-aws-cli-2/tree
        aws s3 sync --no-progress tree s3://of-aws-cli-2/tree > second
        test ! -s second
        aws s3 cp --no-progress s3://of-aws-cli-2/tree/big s3://of-aws-cli-2/copied
        aws s3 mv --no-progress s3://of-aws-cli-2/tree/sub/small s3://of-aws-cli-2/tree/moved
        mv tree/sub/small tree/moved; rmdir tree/sub; cp tree/big copied
        aws s3 sync --no-progress s3://of-aws-cli-2/tree back
        diff -r tree back
        aws s3 cp s3://of-aws-cli-2/copied - | cmp - copied
        aws s3 ls --recursive s3://of-aws-cli-2 | awk '{{ print $3, $4 }}'
        aws s3 rb s3://of-aws-cli-2 2> refused || cat refused
        aws s3 rm --recursive s3://of-aws-cli-2
        aws s3 rb s3://of-aws-cli-2
        """,
    )
    assert "20000000 copied\n20000000 tree/big\n0 tree/empty\n6 tree/moved\n" in said
    assert "BucketNotEmpty" in said


@works("ranges", "metadata", "checksums", "conditions")
def test_the_api_commands_give_what_they_were_given(gateway: Gateway) -> None:
    gateway.shell(
        "aws cli",
        """
        echo 0123456789 > body
        api() { local command=$1; shift; aws s3api $command --bucket of-aws-cli --key api "$@"; }
        api put-object --body body --metadata a=1,b=2 --content-type x/y --checksum-algorithm SHA256 > put
        api head-object --checksum-mode ENABLED > head
        grep -q '"a": "1"' head; grep -q x/y head
        sum=$(openssl dgst -sha256 -binary body | base64)
        grep -qF "$sum" put; grep -qF "$sum" head
        api get-object --range bytes=3-5 part > /dev/null
        test "$(cat part)" = 345
        api put-object --body body --if-none-match '*' 2> said && exit 1
        grep -q PreconditionFailed said
        """,
    )


@works("presigned")
def test_a_presigned_url_is_fetched_by_curl(gateway: Gateway) -> None:
    said = gateway.shell("aws cli", 'curl -sS --fail-with-body "$(aws s3 presign s3://of-aws-cli/hello)"')
    assert said == "hello\n"


@works("virtual host")
def test_buckets_are_named_in_hosts_when_it_is_told_to(gateway: Gateway) -> None:
    said = gateway.shell(
        "aws cli",
        "aws configure set default.s3.addressing_style virtual; aws s3 ls s3://of-aws-cli/hello --debug 2>&1",
        by_host=True,
    )
    assert "http://of-aws-cli.lake.test/" in said
    assert " hello\n" in said


@works("put", "get")
def test_nothing_moves_between_a_folder_and_what_lake_put_of_it(gateway: Gateway) -> None:
    tree = dated_tree(gateway, CLIENT.name)
    gateway.served.good("put", "-r", str(tree), "of-aws-cli/synced")
    said = gateway.shell(
        "aws cli",
        """
        aws s3 sync dated s3://of-aws-cli/synced
        aws s3 sync s3://of-aws-cli/synced dated
        aws s3 sync s3://of-aws-cli/synced dated-back > /dev/null
        aws s3 sync dated-back s3://of-aws-cli/synced
        aws s3 sync s3://of-aws-cli/synced dated-back
        """,
    )
    assert said == ""


def test_what_is_not_offered_is_said_to_be_so(gateway: Gateway) -> None:
    said = gateway.shell(
        "aws cli",
        """
        aws s3api put-bucket-acl --bucket of-aws-cli --acl private 2>&1 || true
        aws s3api put-bucket-logging --bucket of-aws-cli --bucket-logging-status {} 2>&1 || true
        """,
    )
    assert said.count("NotImplemented") == 2
