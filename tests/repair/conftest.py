"""Commands that run in this process say nothing but their results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from cli import logs


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No log: it would go to the outputs of the test that came first."""

    def dropped(*_: object) -> dict[str, Any]:
        raise structlog.DropEvent

    monkeypatch.setattr(logs, "log_to_stderr", lambda *_: None)
    structlog.configure(processors=[dropped], cache_logger_on_first_use=False)
    yield
    structlog.reset_defaults()
