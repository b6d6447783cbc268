"""Makes buckets whose names break S3's rules, as old stores have them: in this process the check is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from unittest import mock

OLD_NAMES: Final = ("b", "My_Models", "xn--abc", "x--table-s3")


@contextmanager
def any_new_name() -> Iterator[None]:
    """Let engines in this process make buckets of all names that a store can hold."""
    with mock.patch("engine.namespace.buckets.check_new_bucket_name"):
        yield
