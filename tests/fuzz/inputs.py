"""Inputs made from good ones: cut, joined, repeated and spoilt, the same for the same seed.

Where a good input is half of the work (a signature, a chunk with its size), bytes at random get nowhere.  So each input
is a good one with a few changes, and the pieces that are put in are those that the readers look for.
"""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
INPUT_BYTES_MAX: Final = 48 << 10
"""Longer than the limit of a head; an input may be one token many times."""
_CHANGES_MAX: Final = 6
_REPEATS_MAX: Final = 3000
_ODD_BYTES: Final = b"\x00\x01\t\n\x0b\r \"#%&'+,-./0:;=?@AZ[]_az|~\x7f\x80\xa0\xc0\xed\xff"
_NUMBERS: Final = (b"0", b"-1", b"+1", b"00", b"1e3", b"0x1", b"65535", b"4294967296", b"9" * 20, b"\xd9\xa1")


class Inputs:
    """Inputs for one reader: `bases` are good ones, `tokens` what it looks for."""

    def __init__(self, bases: Sequence[bytes], tokens: Sequence[bytes], seed: int) -> None:
        self._bases = list(bases)
        self._tokens = [*tokens, *_NUMBERS]
        self._random = random.Random(seed)
        self._changes: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._set,
            self._insert,
            self._insert,
            self._replace,
            self._delete,
            self._double,
            self._swap,
            self._splice,
            self._truncate,
        )

    def keep(self, data: bytes) -> None:
        """Use this input as a base, too, from now on."""
        self._bases.append(data)

    def next(self) -> bytes:
        """Make one more input."""
        chosen = self._random
        found = bytearray(chosen.choice(self._bases))
        for _ in range(chosen.randint(1, _CHANGES_MAX)):
            chosen.choice(self._changes)(found)
        if chosen.random() < 0.002:
            at = chosen.randint(0, len(found))
            found[at:at] = chosen.choice(self._tokens) * chosen.randint(1, _REPEATS_MAX)
        return bytes(found[:INPUT_BYTES_MAX])

    def _place(self, found: bytearray) -> int:
        return self._random.randrange(len(found)) if found else 0

    def _range(self, found: bytearray) -> slice:
        at = self._place(found)
        return slice(at, at + self._random.choice((1, 1, 2, 3, 8, 40)))

    def _flip(self, found: bytearray) -> None:
        if found:
            found[self._place(found)] ^= 1 << self._random.randrange(8)

    def _set(self, found: bytearray) -> None:
        if found:
            found[self._place(found)] = self._random.choice(_ODD_BYTES)

    def _insert(self, found: bytearray) -> None:
        at = self._random.randint(0, len(found))
        found[at:at] = self._random.choice(self._tokens)

    def _replace(self, found: bytearray) -> None:
        found[self._range(found)] = self._random.choice(self._tokens)

    def _delete(self, found: bytearray) -> None:
        del found[self._range(found)]

    def _double(self, found: bytearray) -> None:
        piece = found[self._range(found)]
        at = self._random.randint(0, len(found))
        found[at:at] = piece

    def _swap(self, found: bytearray) -> None:
        piece = found[self._range(found)]
        found[self._range(found)] = piece.swapcase()

    def _splice(self, found: bytearray) -> None:
        other = self._random.choice(self._bases)
        found[self._place(found) :] = other[self._random.randint(0, len(other)) :]

    def _truncate(self, found: bytearray) -> None:
        del found[self._random.randint(0, len(found)) :]


def kept_inputs(name: str) -> list[bytes]:
    """Return the inputs kept for a reader: each of them once reached something new in it."""
    return [b64decode(line) for line in (CORPUS / f"{name}.base64").read_text().splitlines()]


def keep_inputs(name: str, found: Sequence[bytes]) -> None:
    """Add inputs to those that are kept for a reader."""
    with (CORPUS / f"{name}.base64").open("a") as file:
        file.writelines(f"{b64encode(data).decode()}\n" for data in found)
