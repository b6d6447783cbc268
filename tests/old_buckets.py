"""Buckets as stores hold them from before new names had S3's rules: made in this process with the check left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from unittest import mock

OLD_NAMES: Final = ("b", "My_Models", "xn--abc", "x--table-s3")


@contextmanager
def any_new_name() -> Iterator[None]:
    """Engines in this process make buckets of all names that a store can hold."""
    with mock.patch("engine.namespace.buckets.check_new_bucket_name"):
        yield
