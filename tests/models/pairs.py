"""Pairs of equals: two writers, two members, two names."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def put(pair: tuple[T, T], index: int, value: T) -> tuple[T, T]:
    """Return the pair with one of its two values changed."""
    return (pair[0], value) if index else (value, pair[1])
