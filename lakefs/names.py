"""Names as users write them: `BUCKET/KEY`, with or without `lake://`.

The engine decides which characters a bucket name or key may have; this module only splits the text.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from lakefs.errors import InvalidName

SCHEME = "lake://"
_SHOWN_CHARACTERS: Final = 80


class Name(NamedTuple):
    """A bucket and a key in it; an empty key, or one that ends in `/`, names a folder."""

    bucket: str
    key: str

    @property
    def is_folder(self) -> bool:
        """True if the text names a folder."""
        return not self.key or self.key.endswith("/")

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}"


def parse_name(text: str) -> Name:
    """Split `BUCKET/KEY` or `lake://BUCKET/KEY`; a bare bucket has the empty key.  InvalidName."""
    bare = text.removeprefix(SCHEME)
    bucket, _, key = bare.partition("/")
    if not bucket:
        raise InvalidName(f"{text!r} names no bucket; write BUCKET/KEY", subject=text)
    try:
        bare.encode()
    except UnicodeEncodeError as error:
        raise InvalidName(f"{text!a} is not UTF-8, as names in the lake are", subject=ascii(text)) from error
    return Name(bucket, key)


def parse_object_name(text: str) -> Name:
    """Like `parse_name`, but InvalidName if the key is empty."""
    name = parse_name(text)
    if not name.key:
        raise InvalidName(f"{text!r} names a bucket, not an object in it; write BUCKET/KEY", subject=text)
    return name


def shown(text: str) -> str:
    """Return a name as messages show it: quoted, escaped if not printable, cut if long."""
    if len(text) > _SHOWN_CHARACTERS:
        return ascii(text[:_SHOWN_CHARACTERS]) + "..."
    return repr(text) if text.isprintable() else ascii(text)
