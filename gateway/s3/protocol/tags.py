"""Tags as S3 has them, from headers and lists.  Pure.

An object has at most 10 tags.  A key has 1 to 128 characters, a value at most 256 (of UTF-16, as S3 counts them), of
letters, digits, spaces and `+ - = . _ : / @`; keys differ, and do not begin with `aws:`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.s3.protocol.errors import S3Error, invalid_argument
from gateway.s3.protocol.targets import parse_query
from lakefs.limits import S3_TAGS_MAX

HEADER: Final = b"x-amz-tagging"
_DIRECTIVE: Final = b"x-amz-tagging-directive"
_KEY_UNITS_MAX: Final = 128
_VALUE_UNITS_MAX: Final = 256
_PUNCTUATION: Final = frozenset("+-=._:/@")
_OF_S3: Final = "aws:"


def tags_of_header(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the tags of x-amz-tagging, `key=value&key=value`, percent-encoded; none without one.  S3Error."""
    text = headers.get(HEADER)
    if not text:
        return {}
    try:
        return checked_tags(list(parse_query(text).items()))
    except S3Error as error:
        if error.code in ("InvalidTag", "BadRequest"):
            raise
        raise invalid_argument(
            "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters without tag "
            "name duplicates.",
            HEADER.decode(),
            text[:256].decode("latin-1"),
        ) from None


def tags_of_copy(headers: Mapping[bytes, bytes]) -> dict[str, str] | None:
    """Return the tags for a copy; None: those of its source.  S3Error."""
    directive = headers.get(_DIRECTIVE, b"COPY").decode("latin-1")
    if directive not in ("COPY", "REPLACE"):
        raise invalid_argument("Unknown tagging directive.", _DIRECTIVE.decode(), directive[:64])
    return tags_of_header(headers) if directive == "REPLACE" else None


def checked_tags(tags: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Check tags.  S3Error BadRequest for more than ten, InvalidTag for a key or value that no tag has."""
    if len(tags) > S3_TAGS_MAX:
        raise S3Error(400, "BadRequest", f"Object tags cannot be greater than {S3_TAGS_MAX}")
    checked: dict[str, str] = {}
    for key, value in tags:
        if not key or not _is_text(key, _KEY_UNITS_MAX):
            raise _invalid_tag("The TagKey you have provided is invalid")
        if key.startswith(_OF_S3):
            raise _invalid_tag("System tags cannot be added/updated by requester")
        if not _is_text(value, _VALUE_UNITS_MAX):
            raise _invalid_tag("The TagValue you have provided is invalid")
        if key in checked:
            raise _invalid_tag("Cannot provide multiple Tags with the same key")
        checked[key] = value
    return checked


def _is_text(text: str, units_max: int) -> bool:
    """Return True if a tag may have that text: letters, digits and spaces of any script, and some ASCII."""
    if len(text) > units_max or sum(1 + (character > "\uffff") for character in text) > units_max:
        return False
    return all(character in _PUNCTUATION or unicodedata.category(character)[0] in "LNZ" for character in text)


def _invalid_tag(message: str) -> S3Error:
    return S3Error(400, "InvalidTag", message)
