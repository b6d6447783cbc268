"""XML as S3 writes it: escaping, elements, whole documents.  Pure; `gateway.s3.protocol.bodies` reads it.

XML 1.0 cannot carry most control characters, not even as references.  S3 writes references all the same, and so does
this module: a client that wants such keys asks for `encoding-type=url`, where `url_encoded` leaves only characters
that XML can carry.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
_DECLARATION: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
_SPECIAL: Final = re.compile('[&<>"\x00-\x1f\x7f-\x9f\u2028\ufffe\uffff]')
OWNER_ID: Final = "lake"
"""Owner of every bucket and object."""
_NAMED: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


def escaped(text: str) -> str:
    """Escape `text` as content of an element; a carriage return or another control character becomes a reference."""
    return _SPECIAL.sub(_reference, text) if _SPECIAL.search(text) else text


def _reference(match: re.Match[str]) -> str:
    found = match[0]
    return _NAMED.get(found) or f"&#x{ord(found):X};"


def url_encoded(key: str) -> str:
    """Encode a key, prefix or delimiter for `encoding-type=url`: percent-encoded but for "/"."""
    return quote(key, safe="/~")


def element(name: str, text: object) -> str:
    """Return `<name>text</name>`; a bool is written `true` or `false`."""
    content = ("true" if text else "false") if isinstance(text, bool) else escaped(str(text))
    return f"<{name}>{content}</{name}>"


def document(root: str, content: str, *, namespace: bool = True) -> bytes:
    """Return a whole answer; `content` is already XML."""
    attribute = f' xmlns="{NAMESPACE}"' if namespace else ""
    return f"{_DECLARATION}<{root}{attribute}>{content}</{root}>".encode()


OWNER: Final = "<Owner>" + element("ID", OWNER_ID) + element("DisplayName", OWNER_ID) + "</Owner>"
