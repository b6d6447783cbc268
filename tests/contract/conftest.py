"""Fixtures of the contract suites."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.contract.engines import KINDS, Kind, every
from tests.fabric_rig import SERVED, Run, run_at

_HERE: Final = Path(__file__).parent
_OF_REQUESTS: Final = ("test_requests_", "test_loads_left_behind")
"""Suites of what the engine does with single requests, whoever sends them."""


@pytest.fixture(params=every())
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each way to ask an engine."""
    return KINDS[request.param]


@pytest.fixture(params=SERVED)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test of RDMA at an engine, and at a head."""
    return partial(run_at, SERVED[request.param])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave blocking clients out of `make test` where only the engine is tried, and at heads where RDMA is.

    The code of their own sends a request and takes in its answer: `test_engine_client` and the suites of the lake.
    """
    for item in items:
        if item.path.parent != _HERE or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        name, served = item.callspec.params.get("kind"), item.callspec.params.get("run")
        is_blocking = name == "blocking" or (name in KINDS and not KINDS[name].can_watch)
        if is_blocking and (item.path.name.startswith(_OF_REQUESTS) or served == "head"):
            item.add_marker(pytest.mark.thorough)
