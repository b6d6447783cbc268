"""Names as users write them, `BUCKET/KEY`, with or without `lake://`; and the rules for bucket names.

The engine decides which characters a key may have; this module only splits the text.

The name of a new bucket keeps S3's rules for general purpose buckets (Amazon S3 User Guide, "General purpose bucket
naming rules"), so that every S3 client, and the host names of virtual-host style, can use it.  A store can hold
buckets with other names, made before it had these rules: shorter ones, capitals, `_`.  They can be looked up, changed
and removed like any other; only creating one is refused.

S3 reserves the suffix `-an` for one kind of general purpose bucket, so a bucket here may have it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from lakefs.errors import InvalidArgument, InvalidName
from lakefs.limits import BUCKET_NAME_BYTES_MAX, BUCKET_NAME_BYTES_MIN, KEYED_KEY_BYTES_MAX

SCHEME = "lake://"
FOLDER_MODE: Final = 0o755
"""Permission bits of a folder that nobody gave any: usual ones, so most folders need no request of their own."""
_SHOWN_CHARACTERS: Final = 80
_BUCKET_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_FORBIDDEN_CHARACTER: Final = re.compile(r"[^a-z0-9.-]")
_ADDRESS: Final = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+")
_RESERVED_PREFIXES: Final = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_SUFFIXES: Final = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
_NAMES_CACHED: Final = 1024
_NO_PARTS: Final = frozenset(("", ".", ".."))
"""Parts that a path cannot have, or that lead elsewhere."""


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


def check_text(name: object) -> str:
    """Return a name of any kind (bucket, object, space, access key) as it is.  InvalidName unless it is text."""
    if not isinstance(name, str):
        hint = "; write it as str" if isinstance(name, (bytes, os.PathLike)) else ""
        raise InvalidName(f"a name is text, not {type(name).__name__}{hint}", subject=shown(ascii(name)))
    return name


def parse_name(text: str) -> Name:
    """Split `BUCKET/KEY` or `lake://BUCKET/KEY`; a bare bucket has the empty key.  InvalidName."""
    bare = check_text(text).removeprefix(SCHEME)
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


def parse_new_name(text: str) -> Name:
    """Like `parse_object_name`, for a name that is made; InvalidName also if no path can say it."""
    return check_path(parse_object_name(text))


def check_path(name: Name) -> Name:
    """Return a name that is to be made.  InvalidName if no path can say its key.

    S3 clients may make such names: there a key is any text.  A mount cannot show them, nor can a folder hold them.
    """
    if not is_path(name.key):
        raise InvalidName(
            f"{shown(str(name))} is no path: a key has no empty part, and no part '.' or '..'", subject=shown(str(name))
        )
    return name


def is_path(key: str) -> bool:
    """Return True if a key is a path below the bucket: of an object, of a folder (with its slash), or empty."""
    return not key or ("\0" not in key and _NO_PARTS.isdisjoint(key.removesuffix("/").split("/")))


def shown(text: str) -> str:
    """Return a name as messages show it: quoted, escaped if not printable, cut if long."""
    if len(text) > _SHOWN_CHARACTERS:
        return ascii(text[:_SHOWN_CHARACTERS]) + "..."
    return repr(text) if text.isprintable() else ascii(text)


# --- names of buckets --------------------------------------------------------------------------------


def is_bucket_name(name: str) -> bool:
    """Return True if a store can hold a bucket of that name."""
    return len(name) <= BUCKET_NAME_BYTES_MAX and _is_bucket_name(name)


@lru_cache(maxsize=_NAMES_CACHED)
def _is_bucket_name(name: str) -> bool:
    return bool(_BUCKET_NAME.fullmatch(name)) and ".." not in name and not _ADDRESS.fullmatch(name)


def check_new_bucket_name(name: str) -> None:
    """Raise InvalidName, with the broken rule, for a name that no new bucket may have."""
    if broken_rule(name):
        raise invalid_bucket_name(name)


def invalid_bucket_name(name: str) -> InvalidName:
    """Return the error for a name that breaks a rule."""
    return InvalidName(f"bucket name {shown(name)} is not valid: {broken_rule(name)}", subject=shown(name))


def broken_rule(name: str) -> str:
    """Return the rule for new buckets that the name breaks, with an example; "" if it keeps all rules."""
    rule = _broken_rule(name)
    return f"{rule}; for example: my-models" if rule else ""


def _broken_rule(name: str) -> str:
    if not BUCKET_NAME_BYTES_MIN <= len(name) <= BUCKET_NAME_BYTES_MAX:
        return f"it has {len(name)} characters; use {BUCKET_NAME_BYTES_MIN} to {BUCKET_NAME_BYTES_MAX}"
    if _FORBIDDEN_CHARACTER.search(name):
        return "use lower-case letters, digits, '.' and '-' only"
    if not (name[0].isalnum() and name[-1].isalnum()):
        return "begin and end it with a letter or a digit"
    if ".." in name:
        return "two dots must not follow each other"
    if _ADDRESS.fullmatch(name):
        return "it must not look like an IP address"
    for prefix in _RESERVED_PREFIXES:
        if name.startswith(prefix):
            return f"S3 reserves names that begin with '{prefix}'"
    for suffix in _RESERVED_SUFFIXES:
        if name.endswith(suffix):
            return f"S3 reserves names that end with '{suffix}'"
    return ""


_PLAIN_BYTES: Final = frozenset((bytes,))
_KEY_LENGTHS: Final = frozenset(range(1, KEYED_KEY_BYTES_MAX + 1))


def check_value_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return keys of keyed blobs: bytes, each of 1 to KEYED_KEY_BYTES_MAX, and none twice.  InvalidArgument."""
    checked = list(keys)
    if not set(map(type, checked)) <= _PLAIN_BYTES or not set(map(len, checked)) <= _KEY_LENGTHS:
        for key in checked:  # one by one only to find the bad one: a match of 64 keys takes some 30 us
            _check_bytes(key)
            if not 1 <= len(key) <= KEYED_KEY_BYTES_MAX:
                raise InvalidArgument(f"a key of keyed blobs has 1 to {KEYED_KEY_BYTES_MAX} bytes, this one {len(key)}")
    if len(set(checked)) < len(checked):
        twice, _ = Counter(checked).most_common(1)[0]
        raise InvalidArgument(f"key {twice.hex()} is in this batch twice")
    return checked


def _check_bytes(key: object) -> None:
    if not isinstance(key, bytes):
        raise InvalidArgument(f"a key of keyed blobs is bytes, not {type(key).__name__}")
