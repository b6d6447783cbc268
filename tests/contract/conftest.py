"""Fixtures of the contract suites."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.contract.engines import KINDS, Kind, every

_HERE: Final = Path(__file__).parent
_OF_REQUESTS: Final = ("test_requests_", "test_loads_left_behind")
"""Suites of what the engine does with single requests, whoever sends them."""


@pytest.fixture(params=every())
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each way to ask an engine."""
    return KINDS[request.param]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave blocking clients out of `make test` where only the engine is tried.

    The code of their own sends a request and takes in its answer: `test_engine_client` and the suites of the lake.
    """
    for item in items:
        if item.path.parent == _HERE and item.path.name.startswith(_OF_REQUESTS) and isinstance(item, pytest.Function):
            name = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
            if name in KINDS and not KINDS[name].can_watch:
                item.add_marker(pytest.mark.thorough)
