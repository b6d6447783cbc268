"""Range, If-*, and HTTP dates, as S3 reads them.  Pure.

Ranges: one range is served.  Any other Range header (several ranges, another unit, first past last, a space in it) is
ignored and the whole object is answered, as S3 does and RFC 9110 14.2 allows.  A range that begins at or behind the
end, or asks for the last 0 bytes, cannot be satisfied.  The last bytes of an empty object are the whole of it.
Conditions (RFC 9110 13.2.2): If-Match decides alone when present, else If-Unmodified-Since; then If-None-Match
decides alone when present, else If-Modified-Since.  Dates that cannot be read are ignored.
Dates have whole seconds; a caller's finer times are cut.
"""

from __future__ import annotations

import calendar
import enum
import re
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import Final, NamedTuple

from lakefs.limits import HTTP_DATES_CACHED

_RANGE: Final = re.compile(rb"bytes=([0-9]{0,19})-([0-9]{0,19})", re.IGNORECASE)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH_NUMBERS: Final = {name: number for number, name in enumerate(_MONTHS, 1)}
_DATE_BYTES_MAX: Final = len("Wednesday, 06-Nov-94 08:49:37 GMT")
_TIME: Final = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_DATE_FORMS: Final = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"[A-Z][a-z]{{2}}, (?P<day>\d\d) (?P<month>[A-Z][a-z]{{2}}) (?P<year>\d{{4}}) {_TIME} GMT",
        rf"[A-Z][a-z]{{5,8}}, (?P<day>\d\d)-(?P<month>[A-Z][a-z]{{2}})-(?P<year>\d\d) {_TIME} GMT",
        rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) (?P<day>[ \d]\d) {_TIME} (?P<year>\d{{4}})",
    )
)
"""IMF-fixdate, RFC 850 and asctime: RFC 9110 5.6.7 requires that all three are read."""


class ByteRange(NamedTuple):
    """Bytes [first, stop) of an object; never empty."""

    first: int
    stop: int


class NoRange(enum.Enum):
    """WHOLE: answer the object, 200.  UNSATISFIABLE: answer 416."""

    WHOLE = enum.auto()
    UNSATISFIABLE = enum.auto()


def select_range(value: bytes | None, size_bytes: int) -> ByteRange | NoRange:
    """Return the range that a Range header selects of an object of `size_bytes`."""
    match = _RANGE.fullmatch(value) if value is not None else None
    if match is None:
        return NoRange.WHOLE
    first_text, last_text = match.groups()
    if not first_text:
        return _suffix(last_text, size_bytes)
    first = int(first_text)
    if last_text and int(last_text) < first:
        return NoRange.WHOLE
    if first >= size_bytes:
        return NoRange.UNSATISFIABLE
    return ByteRange(first, min(int(last_text) + 1, size_bytes) if last_text else size_bytes)


def stated_range(value: bytes | None) -> ByteRange | None:
    """Return the bytes that a Range header names, without the object's size; None for whole, tail, and none."""
    match = _RANGE.fullmatch(value) if value is not None else None
    if match is None or not (match[1] and match[2]):
        return None
    first, stop = int(match[1]), int(match[2]) + 1
    return ByteRange(first, stop) if first < stop else None


def _suffix(length_text: bytes, size_bytes: int) -> ByteRange | NoRange:
    if not length_text:
        return NoRange.WHOLE
    length = int(length_text)
    if not length:
        return NoRange.UNSATISFIABLE
    return ByteRange(max(0, size_bytes - length), size_bytes) if size_bytes else NoRange.WHOLE


def content_range(selected: ByteRange | NoRange, size_bytes: int) -> str:
    """Return the value of Content-Range, also for a 416."""
    if isinstance(selected, ByteRange):
        return f"bytes {selected.first}-{selected.stop - 1}/{size_bytes}"
    return f"bytes */{size_bytes}"


class Condition(enum.Enum):
    """PROCEED: the conditions hold.  NOT_MODIFIED: 304 for a read, 412 for a copy's source.  FAILED: 412."""

    PROCEED = enum.auto()
    NOT_MODIFIED = enum.auto()
    FAILED = enum.auto()


def check_conditions(headers: Mapping[bytes, bytes], etag: str, modified_s: float, prefix: bytes = b"") -> Condition:
    """Evaluate the If-* headers for an object that exists; `etag` without quotes.

    `prefix`: b"x-amz-copy-source-" for the source of a copy.
    """
    match = headers.get(prefix + b"if-match")
    if match is not None:
        holds = etag_listed(match, etag)
    else:
        since = header_date(headers.get(prefix + b"if-unmodified-since"))
        holds = since is None or int(modified_s) <= since
    if not holds:
        return Condition.FAILED
    none_match = headers.get(prefix + b"if-none-match")
    if none_match is not None:
        return Condition.NOT_MODIFIED if etag_listed(none_match, etag) else Condition.PROCEED
    since = header_date(headers.get(prefix + b"if-modified-since"))
    return Condition.NOT_MODIFIED if since is not None and int(modified_s) <= since else Condition.PROCEED


def etag_listed(value: bytes, etag: str) -> bool:
    """Return True if `*` or the list of ETags names `etag`; quotes may be missing, as S3 allows."""
    wanted = etag.encode("latin-1", "replace")
    return any(
        listed == b"*" or listed.removeprefix(b"W/").strip(b'"') == wanted
        for listed in map(bytes.strip, value.split(b","))
    )


def range_holds(if_range: bytes | None, etag: str, modified_s: float) -> bool:
    """Return True if a Range beside this If-Range is served; else the whole object is (RFC 9110 13.1.5)."""
    if if_range is None:
        return True
    date = header_date(if_range)
    if date is not None:
        return date == int(modified_s)
    return not if_range.startswith(b"W/") and if_range.strip(b'"') == etag.encode("latin-1", "replace")


def header_date(value: bytes | None) -> int | None:
    """Return a date header in seconds since 1970; None if it is missing or no date."""
    return parse_http_date(value) if value is not None and len(value) <= _DATE_BYTES_MAX else None


@lru_cache(maxsize=HTTP_DATES_CACHED)
def format_http_date(epoch_s: int) -> str:
    """Format whole seconds since 1970 as IMF-fixdate: `Sun, 06 Nov 1994 08:49:37 GMT`.  Independent of the locale."""
    return formatdate(epoch_s, usegmt=True)


@lru_cache(maxsize=HTTP_DATES_CACHED)
def parse_http_date(value: bytes) -> int | None:
    """Parse a date in one of HTTP's three forms to seconds since 1970; None if it is none.

    Values are cached: callers leave out those too long to be a date.
    """
    text = value.decode("latin-1")
    match = next(filter(None, (form.fullmatch(text) for form in _DATE_FORMS)), None)
    if match is None:
        return None
    month = _MONTH_NUMBERS.get(match["month"])
    year, day = int(match["year"]), int(match["day"])
    hour, minute, second = int(match["hour"]), int(match["minute"]), int(match["second"])
    if len(match["year"]) == 2:
        year += 2000 if year < 70 else 1900
    return None if month is None else epoch_of(year, month, day, hour, minute, second)


def epoch_of(year: int, month: int, day: int, hour: int, minute: int, second: int) -> int | None:
    """Return a time in seconds since 1970; None if the calendar has none such, or it is earlier."""
    if not (year >= 1970 and 1 <= month <= 12 and hour < 24 and minute < 60 and second < 61):
        return None
    if not 1 <= day <= calendar.monthrange(year, month)[1]:
        return None
    return calendar.timegm((year, month, day, hour, minute, second))
