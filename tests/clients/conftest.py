"""One engine for all clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.clients.gateway import DOMAIN, Gateway, bucket_of, gateway_of
from tests.e2e.served import serving


@pytest.fixture(scope="session")
def engine_gateway() -> Iterator[Gateway]:
    """Run the engine, with S3 on a port of its own, and a domain for buckets named in the host."""
    # Not pytest's folder: a socket's path must be short.
    with TemporaryDirectory(prefix="lake-") as path:
        options = ("--s3", "127.0.0.1:0", "--s3-domains", DOMAIN, "--s3-accept-sse", "AES256")
        with serving(Path(path), *options) as served:
            yield gateway_of(served, Path(path))


@pytest.fixture(scope="module")
def gateway(request: pytest.FixtureRequest, engine_gateway: Gateway) -> Gateway:
    """The same, with the bucket of the module's client."""
    bucket = bucket_of(request.module.CLIENT.name)
    engine_gateway.served.good("bucket", "create", bucket)
    return engine_gateway
