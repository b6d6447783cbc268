"""Keys, their values, and the journals that clients of keyed blobs keep: what they were about to do, what was answered.

A value begins with its label, and key and label make its bytes.  So whoever reads a value knows alone if it is one of
that key.  Values of the label `pool` are those of a few contents that many keys share.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

POOL: Final = "pool"
SIZE_MAX: Final = 5_000_000
_POOLED: Final = 12
_LABEL_BYTES: Final = 40
_SIZES: Final = (_LABEL_BYTES, 300, 5_000, 40_000, 65_536, 200_000, 600_000, SIZE_MAX)
_WEIGHTS: Final = (10, 20, 20, 20, 20, 30, 10, 1)


def key_of(space: str, number: int) -> bytes:
    """Return a key of a space as clients have them: a hash, and a few bytes beside it."""
    return hashlib.sha256(f"{space} {number}".encode()).digest() + number.to_bytes(4, "big")


@lru_cache(128)
def value_of(key: bytes, label: str) -> bytes:
    """Return the bytes that a label stands for under a key."""
    chance = random.Random(f"pool {key[0] % _POOLED}" if label == POOL else f"{key.hex()} {label}")
    (size,) = chance.choices(_SIZES, _WEIGHTS)
    return label.encode().ljust(_LABEL_BYTES) + chance.randbytes(size - _LABEL_BYTES)


def label_of(key: bytes, value: bytes) -> str:
    """Return the label of a value.  AssertionError when it is no value of that key."""
    label = value[:_LABEL_BYTES].decode(errors="replace").rstrip()
    assert value == value_of(key, label), f"key {key.hex()[:12]} has {len(value)} bytes of others: {value[:40]!r}"
    return label


# --- journals --------------------------------------------------------------------------------------------


class Journal:
    """A client's journal: a line before each change, and one with its outcome."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            os.write(self._descriptor, b"\n")

    def intend(self, space: str, change: Mapping[int, str | None]) -> None:
        """Note what is about to be done: for the number of each key a label to put, or None to remove its value."""
        self._write({"space": space, "at": time.monotonic_ns(), "change": list(change.items())})

    def done(self, outcomes: Sequence[str]) -> None:
        """Note the outcomes of that, in order: STORED, PRESENT, REMOVED, ABSENT or FAILED."""
        self._write({"outcomes": outcomes})

    def found(self, space: str, state: Mapping[int, str | None]) -> None:
        """Note what a check found: from now on that is known."""
        self._write({"space": space, "at": time.monotonic_ns(), "found": list(state.items())})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@dataclass
class KeyState:
    """All that journals say of one key."""

    may_be: set[str | None] = field(default_factory=lambda: {None})
    """Labels that its value may have; None: none."""
    labels: set[str] = field(default_factory=set)
    """Labels that were ever put."""
    held_at: int = -1
    """Time before the last change that was answered with STORED or PRESENT."""
    stored_at: int = -1
    """Time before the last change that was answered with STORED, and its label."""
    stored: str = ""

    def intend(self, label: str | None) -> None:
        """Note a change that may or may not happen."""
        if label is None:
            self.may_be.add(None)
        else:
            self.labels.add(label)
            if None in self.may_be:
                self.may_be.add(label)

    def end(self, at: int, label: str | None, outcome: str, before: set[str | None]) -> None:
        """Note the outcome of a change; AssertionError when no state before it has that outcome."""
        values = before - {None}
        good = {"STORED": None in before, "PRESENT": bool(values), "REMOVED": bool(values), "ABSENT": None in before}
        assert outcome == "FAILED" or good[outcome], f"{outcome} for {label}, which had {before}"
        if outcome == "STORED":
            self.may_be = {label}
        elif outcome == "PRESENT":
            self.may_be = values
        elif outcome != "FAILED":
            self.may_be = {None}
        else:
            self.may_be = before
        if outcome == "STORED" and at > self.stored_at and label is not None:
            self.stored_at, self.stored = at, label
        if outcome in ("STORED", "PRESENT"):
            self.held_at = max(self.held_at, at)


States = dict[int, KeyState]
"""States of keys, by number."""


def read_journal(path: Path, space: str, states: States, *, alone: bool) -> int:
    """Replay one space of a journal into `states`; returns the number of answered changes.

    `alone`: nobody else changes these keys, and nothing is evicted, so each outcome follows from what was before.
    """
    answered = 0
    open_change: tuple[int, list[tuple[int, str | None, set[str | None]]]] | None = None
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by the end of the client
        if entry.get("outcomes") is not None:
            if open_change is not None:
                at, items = open_change
                for (number, label, before), outcome in zip(items, entry["outcomes"], strict=True):
                    states[number].end(at, label, outcome, before if alone else {None, "another's"})
                    answered += outcome != "FAILED"
            open_change = None
        elif entry["space"] != space:
            open_change = None
        elif "found" in entry:
            for number, label in entry["found"]:
                states.setdefault(number, KeyState()).may_be = {label}
        else:
            items = []
            for number, label in entry["change"]:
                state = states.setdefault(number, KeyState())
                items.append((number, label, set(state.may_be)))
                state.intend(label)
            open_change = entry["at"], items
    return answered
