"""XML that S3 clients send, read into values.  Pure; nothing here touches the store.

Rules kept here:
- It is UTF-8, whatever its declaration says; expat reads it.  A document type declaration is refused before its
  contents are read, so there are no entities to expand and nothing to fetch.
- Bytes, depth and number of elements are bounded before memory is spent; 1,000 keys and 10,000 parts fit.
- Elements may be in S3's namespace, in another or in none.  Each body has a closed list of them (`_Shape`), as requests
  have of headers: one that S3 has and this store does not is 501, any other MalformedXML, and so is text where elements
  belong.  An element ignored is a request of the client that is lost: the tags of a new bucket, MfaDelete.
- Text is kept as it is, white space included: keys have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple, NoReturn
from xml.parsers import expat

from gateway.http.ranges import header_date
from gateway.s3.protocol.checksums import ELEMENTS, Algorithm, decoded
from gateway.s3.protocol.cors import METHODS, RULES_MAX
from gateway.s3.protocol.errors import S3Error, not_implemented
from gateway.s3.protocol.headers import read_size
from lakefs.limits import DELETE_BATCH, S3_PARTS_MAX, S3_XML_BODY_BYTES_MAX, S3_XML_DEPTH_MAX, S3_XML_ELEMENTS_MAX
from lakefs.wire.messages import CorsRule

_NUMBER: Final = re.compile(r"[0-9]{1,5}")
_SECONDS: Final = re.compile(r"[0-9]{1,9}")
_FIELD_NAME: Final = re.compile(r"[!#$%&'+.^_`|~0-9A-Za-z-]{1,256}")
_ID_CHARACTERS_MAX: Final = 255
_ALGORITHMS: Final = {name: algorithm for algorithm, name in ELEMENTS.items()}


_Shape = Mapping[str, "_Shape"]
"""The children that an element may have, by name; none for one that has text."""
_TEXT: Final[_Shape] = {}
_CREATE_BUCKET: Final[_Shape] = {"LocationConstraint": _TEXT}
_DELETE: Final[_Shape] = {
    "Object": {"Key": _TEXT, "VersionId": _TEXT, "ETag": _TEXT, "Size": _TEXT, "LastModifiedTime": _TEXT},
    "Quiet": _TEXT,
}
_COMPLETE: Final[_Shape] = {"Part": {"PartNumber": _TEXT, "ETag": _TEXT, **dict.fromkeys(_ALGORITHMS, _TEXT)}}
_TAGGING: Final[_Shape] = {"TagSet": {"Tag": {"Key": _TEXT, "Value": _TEXT}}}
_CORS: Final[_Shape] = {
    "CORSRule": {
        "ID": _TEXT,
        "AllowedHeader": _TEXT,
        "AllowedMethod": _TEXT,
        "AllowedOrigin": _TEXT,
        "ExposeHeader": _TEXT,
        "MaxAgeSeconds": _TEXT,
    }
}
_VERSIONING: Final[_Shape] = {"Status": _TEXT, "MfaDelete": _TEXT}
_NOT_OFFERED: Final = frozenset({
    "Bucket", "ChecksumMD5", "ChecksumSHA512", "ChecksumXXHASH128", "ChecksumXXHASH3", "ChecksumXXHASH64", "Location",
    "Tags",
})  # fmt: skip
"""Elements that S3 has in these bodies and this store does not."""


class DeleteItem(NamedTuple):
    """One object of a Delete, and its conditions: `etag` without quotes, its size, its time in whole seconds."""

    key: str
    version_id: str = ""
    etag: str | None = None
    size_bytes: int | None = None
    mtime_s: int | None = None


class Delete(NamedTuple):
    """DeleteObjects.  `quiet`: only failures are answered."""

    items: tuple[DeleteItem, ...]
    quiet: bool


class CompletedPart(NamedTuple):
    """One part that CompleteMultipartUpload names; `etag` without quotes, checksums as the client gave them."""

    number: int
    etag: str
    checksums: dict[Algorithm, bytes]


class _Element:
    """One element: its children, or its text."""

    __slots__ = ("children", "name", "text")

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = ""
        self.children: list[_Element] = []

    def all(self, name: str) -> Iterator[_Element]:
        return (child for child in self.children if child.name == name)

    def fields(self) -> dict[str, str]:
        """Return the texts of its children that have text; a repeated name is refused."""
        fields: dict[str, str] = {}
        for child in self.children:
            if child.children:
                continue
            if child.name in fields:
                raise _malformed(f"{self.name} has more than one {child.name}")
            fields[child.name] = child.text
        return fields


def read_create_bucket(body: bytes) -> str:
    """Return the LocationConstraint of CreateBucketConfiguration; "" for none, and for an empty body.  S3Error."""
    if not body:
        return ""
    return _root(body, "CreateBucketConfiguration", _CREATE_BUCKET).fields().get("LocationConstraint", "").strip()


def read_delete(body: bytes) -> Delete:
    """Return the objects that DeleteObjects names, 1 to 1,000 of them.  S3Error."""
    root = _root(body, "Delete", _DELETE)
    items = [_delete_item(found) for found in root.all("Object")]
    if not 1 <= len(items) <= DELETE_BATCH:
        raise _malformed(f"a Delete names 1 to {DELETE_BATCH} objects, not {len(items)}")
    return Delete(tuple(items), _boolean(root.fields().get("Quiet", "")))


def read_complete(body: bytes) -> tuple[CompletedPart, ...]:
    """Return the parts of CompleteMultipartUpload, 1 to 10,000.  S3Error InvalidPartOrder if not in rising order."""
    parts = tuple(map(_completed_part, _root(body, "CompleteMultipartUpload", _COMPLETE).all("Part")))
    if not 1 <= len(parts) <= S3_PARTS_MAX:
        raise _malformed(f"an upload is completed from 1 to {S3_PARTS_MAX} parts, not {len(parts)}")
    numbers = [part.number for part in parts]
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise S3Error(
            400,
            "InvalidPartOrder",
            "The list of parts was not in ascending order. The parts list must be specified in order by part number.",
        )
    return parts


def read_tagging(body: bytes) -> list[tuple[str, str]]:
    """Return the tags of Tagging, in its order, unchanged.  S3Error."""
    sets = list(_root(body, "Tagging", _TAGGING).all("TagSet"))
    if len(sets) != 1:
        raise _malformed("Tagging has one TagSet")
    tags = [tag.fields() for tag in sets[0].all("Tag")]
    if not all("Key" in tag and "Value" in tag for tag in tags):
        raise _malformed("a Tag has a Key and a Value")
    return [(tag["Key"], tag["Value"]) for tag in tags]


def read_cors(body: bytes) -> list[CorsRule]:
    """Return the rules of CORSConfiguration, 1 to 100.  S3Error."""
    rules = [_cors_rule(found) for found in _root(body, "CORSConfiguration", _CORS).all("CORSRule")]
    if not 1 <= len(rules) <= RULES_MAX:
        raise _malformed(f"a CORSConfiguration has 1 to {RULES_MAX} rules, not {len(rules)}")
    return rules


def read_versioning(body: bytes) -> str:
    """Return the Status of VersioningConfiguration: "Enabled", "Suspended", or "" for none.  S3Error."""
    fields = _root(body, "VersioningConfiguration", _VERSIONING).fields()
    mfa_delete = fields.get("MfaDelete", "").strip()
    if mfa_delete == "Enabled":
        raise not_implemented("MFA delete")
    if mfa_delete not in ("", "Disabled"):
        raise _malformed("the MfaDelete of VersioningConfiguration is Enabled or Disabled")
    status = fields.get("Status", "").strip()
    if status not in ("", "Enabled", "Suspended"):
        raise _malformed("the Status of VersioningConfiguration is Enabled or Suspended")
    return status


def _cors_rule(found: _Element) -> CorsRule:
    """Read one rule.  S3Error InvalidRequest for a pattern or method that S3 has not."""
    origins, methods, headers, exposed, ages, ids = (
        [child.text.strip() for child in found.all(name)]
        for name in ("AllowedOrigin", "AllowedMethod", "AllowedHeader", "ExposeHeader", "MaxAgeSeconds", "ID")
    )
    if not (origins and methods and all((*origins, *methods, *headers, *exposed))) or len(ages) > 1 or len(ids) > 1:
        raise _malformed("a CORSRule has an AllowedOrigin, an AllowedMethod, and at most one ID and MaxAgeSeconds")
    if any(not _SECONDS.fullmatch(age) for age in ages):
        raise _malformed("the MaxAgeSeconds of a CORSRule is a number of seconds")
    for method in methods:
        if method not in METHODS:
            message = f"Found unsupported HTTP method in CORS config. Unsupported method is {method[:64]}"
            raise S3Error(400, "InvalidRequest", message)
    for name, patterns in (("AllowedOrigin", origins), ("AllowedHeader", headers)):
        for pattern in patterns:
            if pattern.count("*") > 1:
                message = f'{name} "{pattern[:256]}" can not have more than one wildcard.'
                raise S3Error(400, "InvalidRequest", message)
    for header in exposed:
        if not _FIELD_NAME.fullmatch(header):
            message = f'ExposeHeader "{header[:256]}" contains wildcard, or is no header.'
            raise S3Error(400, "InvalidRequest", message)
    if any(len(text) > _ID_CHARACTERS_MAX for text in ids):
        raise S3Error(400, "InvalidRequest", f"The ID of a CORSRule has at most {_ID_CHARACTERS_MAX} characters.")
    return CorsRule(origins, methods, headers, exposed, int(ages[0]) if ages else None, ids[0] if ids else "")


def _delete_item(found: _Element) -> DeleteItem:
    """Read one object.  A malformed condition is refused: nothing is deleted that a client wanted to keep."""
    fields = found.fields()
    key = fields.get("Key")
    if not key:
        raise _malformed("an Object without a Key")
    etag, size, modified = fields.get("ETag"), fields.get("Size"), fields.get("LastModifiedTime")
    size_bytes = None if size is None else read_size(size.strip().encode())
    mtime_s = None if modified is None else header_date(modified.strip().encode())
    if size is not None and size_bytes is None:
        raise _malformed("the Size of an Object is a number of bytes")
    if modified is not None and mtime_s is None:
        raise _malformed("the LastModifiedTime of an Object is a date as HTTP has it")
    etag = None if etag is None else _etag(etag)
    return DeleteItem(key, fields.get("VersionId", "").strip(), etag, size_bytes, mtime_s)


def _completed_part(part: _Element) -> CompletedPart:
    fields = part.fields()
    number = fields.get("PartNumber", "").strip()
    if not _NUMBER.fullmatch(number):
        raise _malformed("a Part has a PartNumber")
    if not 1 <= int(number) <= S3_PARTS_MAX:
        raise S3Error(400, "InvalidArgument", f"PartNumber must be an integer between 1 and {S3_PARTS_MAX}, inclusive")
    checksums = {
        _ALGORITHMS[name]: decoded(_ALGORITHMS[name], text.strip().encode())
        for name, text in fields.items()
        if name in _ALGORITHMS and text
    }
    return CompletedPart(int(number), _etag(fields.get("ETag", "")), checksums)


def _etag(text: str) -> str:
    return text.strip().removeprefix('"').removesuffix('"')


def _boolean(text: str) -> bool:
    value = text.strip().lower()
    if value not in ("", "true", "false"):
        raise _malformed("Quiet is true or false")
    return value == "true"


class _Builder:
    """Callbacks for expat; builds the tree of elements of one shape."""

    def __init__(self, shape: _Shape) -> None:
        """`shape`: of the document, whose only child is the root."""
        self.document = _Element("")
        self._open = [self.document]
        self._shapes = [shape]
        self._texts: list[str] = []
        self._element_count = 0

    def start(self, name: str, _attributes: object) -> None:
        self._element_count += 1
        if len(self._open) > S3_XML_DEPTH_MAX or self._element_count > S3_XML_ELEMENTS_MAX:
            raise _malformed("the XML is nested too deep, or has too many elements")
        found = _Element(name.rpartition(" ")[2])
        shape = self._shapes[-1].get(found.name)
        if shape is None:
            raise self._not_in_list(found.name)
        self._refuse_text()
        self._open[-1].children.append(found)
        self._open.append(found)
        self._shapes.append(shape)

    def end(self, _name: str) -> None:
        if self._shapes.pop() is not _TEXT:
            self._refuse_text()
        self._open.pop().text = "".join(self._texts)
        self._texts.clear()

    def text(self, text: str) -> None:
        self._texts.append(text)

    def _refuse_text(self) -> None:
        """Refuse text other than white space, where elements belong."""
        if self._texts and "".join(self._texts).strip():
            raise _malformed(f"{self._open[-1].name} has elements, and no text")
        self._texts.clear()

    def _not_in_list(self, name: str) -> S3Error:
        parent = self._open[-1].name
        if not parent:
            (expected,) = self._shapes[-1]
            return _malformed(f"{expected} was expected, not {name[:64]}")
        if name in _NOT_OFFERED:
            return not_implemented(f"{name} in {parent}")
        return _malformed(f"{parent} has no element {name[:64]}")

    def refuse(self, *_declaration: object) -> NoReturn:
        raise _malformed("XML here has no document type declaration and no entities")


def _root(body: bytes, name: str, shape: _Shape) -> _Element:
    """Parse a body and return its root element, which must have that name and shape.  S3Error."""
    if len(body) > S3_XML_BODY_BYTES_MAX:
        raise S3Error(400, "MalformedXML", f"the XML is longer than {S3_XML_BODY_BYTES_MAX} bytes")
    builder = _Builder({name: shape})
    parser = expat.ParserCreate("utf-8", namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = builder.refuse
    parser.EntityDeclHandler = builder.refuse
    parser.ExternalEntityRefHandler = builder.refuse
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.text
    try:
        parser.Parse(body.decode(), True)
    except UnicodeDecodeError:
        raise _malformed("it is not UTF-8") from None
    except expat.ExpatError as error:
        raise _malformed(expat.errors.messages.get(error.code, "not well-formed")) from None
    return builder.document.children[0]


def _malformed(what: str) -> S3Error:
    return S3Error(
        400,
        "MalformedXML",
        f"The XML you provided was not well-formed or did not validate against our published schema: {what}",
    )
