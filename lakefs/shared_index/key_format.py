"""Entries of the keyed index: a table in the format of the shared index, by which clients find keyed blobs.

    a value    id: SHA-256 of 2, number of its space (4 bytes, big endian), key
    a space    id: SHA-256 of 3, number of the space

The digest is of the key of the record in the table `keyed`.  An id begins with the kind of a data chunk, as the format
wants it.  The tier of an entry says what it is:

    PLACED         a value of one part, in a segment: the tier, place and checksum of its chunk
    UNPLACED       a value, of which the length is known; the engine knows where it lies
    DOUBTFUL       the engine knows if there is a value
    SPACE_WHOLE    a space; each of its keys that has a value has an entry
    SPACE_PARTIAL  a space; a key without entry may have a value

The length of a value's entry, PLACED or UNPLACED, is that of the whole value (0 from an earlier engine: it is to be
asked for).  The length of a space's entry is SOME_EXPIRE if it has, or had, a value that expires: an entry of a value
does not tell when, and stays for a moment after that time.  All other fields of an entry that is not PLACED are 0.  A
reader trusts no entry of a space that has none itself.
"""

from __future__ import annotations

import hashlib
from typing import Final

KEYED_MAGIC: Final = b"LAKEKEYI"
ABSENT: Final = 0
"""Tier of a look-up's answer: the key has no value."""
PLACED: Final = 1
UNPLACED: Final = 16
DOUBTFUL: Final = 17
SPACE_WHOLE: Final = 18
SPACE_PARTIAL: Final = 19
SOME_EXPIRE: Final = 1
_KIND: Final = b"\x01"
_OF_SPACE: Final = b"\x03"


def id_of_record(key: bytes) -> bytes:
    """Return the id of an entry, from the key of the record of its value or space."""
    return _KIND + hashlib.sha256(key).digest()


def id_of_space(number: int) -> bytes:
    """Return the id of a space's entry."""
    return id_of_record(_OF_SPACE + number.to_bytes(4, "big"))
