"""Fixtures of the tests of keyed blobs on a real engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.content.verify import Check
from tests.e2e.served import Served
from tests.keyed.clients import KINDS


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("keyed"))
    yield made
    made.kill()


@pytest.fixture
def writer(engine: Served) -> Iterator[Lake]:
    """A client for changes, without spaces."""
    with connect(engine.server, check=Check.CRC32C) as lake:
        for space in lake.spaces():
            lake.remove_space(space.name)
        yield lake


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
