"""Reads that take no request, though the kernel may drop cached pages whenever it likes, also those just read.

A machine that reclaims cold memory early (DAMON's `pageout`) does so all the time: only what takes a request every
time breaks the promise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar
from unittest import mock

from lakefs.client.blocking.driver import BlockingDriver
from tests.e2e.served import WAIT_S

T = TypeVar("T")


class EngineAskedError(Exception):
    """A request was about to be made."""


def no_requests(method: str = "run") -> AbstractContextManager[object]:
    """Context manager: EngineAskedError for operations that may make requests.

    With "_start", for what they begin: each request, or work for a thread.  They cannot tidy up after such an error.
    """
    return mock.patch.object(BlockingDriver, method, side_effect=EngineAskedError)


def without_requests(do: Callable[[], T], prepare: Callable[[], object], method: str = "run") -> T:
    """Do what takes no request, and return its result.  Where it took one: `prepare`, and do it again, for a while."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            with no_requests(method):
                return do()
        except EngineAskedError:
            assert time.monotonic() < until, "it took a request each time"
        prepare()
