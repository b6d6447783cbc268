"""boto3 clients of an engine's S3 face, and a check that a call is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.e2e.served import Served

KEYS_ARE_FRESH_S = 1.1
"""The gateway reads its keys at most once a second."""


def url_of(served: Served) -> str:
    """Return the URL where the engine serves S3."""
    [line] = [line for line in served.printed if line.startswith("s3 ")]
    return line.split()[1]


def client_of(served: Served, *flags: str) -> Any:
    """Make a boto3 client with its defaults, and an access key made with these flags of `lake key create`."""
    key = json.loads(served.good("key", "create", *flags, "--json").text)
    time.sleep(KEYS_ARE_FRESH_S)
    return boto3.client(
        "s3",
        endpoint_url=url_of(served),
        region_name="us-east-1",
        aws_access_key_id=key["access_key"],
        aws_secret_access_key=key["secret_key"],
        config=Config(retries={"max_attempts": 0}, signature_version="s3v4"),
    )


def refused(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """Make a call that must be refused; return status and code."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]
