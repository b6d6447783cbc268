"""Fixtures of the contract suites."""

from __future__ import annotations

import pytest

from tests.contract.engines import KINDS, Kind


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each way to ask an engine."""
    return KINDS[request.param]
