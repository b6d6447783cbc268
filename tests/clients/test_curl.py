"""curl, which signs requests itself."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("curl", "debian", lacks=("presigned", "checksums", "multipart"), also="`--aws-sigv4`")


@works("put", "get", "ranges", "list", "delete", "buckets", "metadata", "conditions", "copy")
def test_requests_are_signed_by_hand(gateway: Gateway) -> None:
    said = gateway.shell(
        "curl",
        """
        body='x-amz-content-sha256: UNSIGNED-PAYLOAD'
        echo; s3 -X PUT $AWS_ENDPOINT_URL/of-curl-2
        head -c 9000000 /dev/urandom > big
        s3 -T big -H "$body" -H 'x-amz-meta-colour: blue' $AWS_ENDPOINT_URL/of-curl-2/big
        s3 $AWS_ENDPOINT_URL/of-curl-2/big | cmp - big
        s3 -r 4194300-4194310 $AWS_ENDPOINT_URL/of-curl-2/big | cmp - <(tail -c +4194301 big | head -c 11)
        s3 -I $AWS_ENDPOINT_URL/of-curl-2/big | grep -i '^x-amz-meta-colour: blue'
        s3 -X PUT -H 'x-amz-copy-source: /of-curl-2/big' $AWS_ENDPOINT_URL/of-curl-2/copied | grep -o '<ETag>'
        s3 -T big -H "$body" -H 'If-None-Match: *' $AWS_ENDPOINT_URL/of-curl-2/big > said 2> error && exit 1
        grep -o PreconditionFailed said
        s3 "$AWS_ENDPOINT_URL/of-curl-2?list-type=2&prefix=b" | grep -o '<Key>[^<]*'
        s3 -X DELETE $AWS_ENDPOINT_URL/of-curl-2/big
        s3 -X DELETE $AWS_ENDPOINT_URL/of-curl-2/copied
        s3 -X DELETE $AWS_ENDPOINT_URL/of-curl-2
        """,
    )
    assert said.splitlines()[-4:] == ["x-amz-meta-colour: blue", "<ETag>", "PreconditionFailed", "<Key>big"]


@works("virtual host")
def test_a_host_names_the_bucket(gateway: Gateway) -> None:
    said = gateway.shell("curl", "s3 --proxy $AWS_ENDPOINT_URL http://of-curl.lake.test/hello")
    assert said.endswith("hello\n")
