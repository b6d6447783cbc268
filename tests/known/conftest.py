"""Fixtures of the tests of known names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from tests.e2e.served import Served
from tests.known.clients import KINDS
from tests.known.history import BUCKET
from tests.served_devices import DEVICES


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("known"))
    yield made
    if DEVICES:
        made.stop()  # members of one that is killed outlive it for a moment, and their folders go
    else:
        made.kill()


@pytest.fixture
def writer(engine: Served) -> Iterator[Lake]:
    """A client for changes, in an empty bucket."""
    with connect(engine.server, repeats=False) as lake:
        if BUCKET in [bucket.name for bucket in lake.buckets()]:
            lake.set_bucket(BUCKET, anonymous_read=False)
            for entry in lake.ls(f"{BUCKET}/"):
                lake.remove(f"{BUCKET}/{entry.key}")
        else:
            lake.create_bucket(BUCKET)
        yield lake


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
