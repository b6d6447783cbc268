"""Parsers for setting values as people write them: addresses, sizes, times, folders.

Each parser takes text and returns a value, or raises InvalidArgument with a sentence that says what to give
instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeGuard

from lakefs.errors import InvalidArgument

DEFAULT_FILE: Final = Path("/etc/lake/lake.toml")
_SIZE: Final = re.compile(r"(\d{1,18})(?:\.(\d{1,18}))?\s*(?:([kmgtp])(?:i?b)?|b)?", re.ASCII | re.IGNORECASE)
_DURATION: Final = re.compile(r"(\d{1,9})\s*([smhd])?", re.ASCII)
_PROTECTION: Final = re.compile(r"[1-9]\d?\+\d", re.ASCII)
_SECONDS: Final = re.compile(r"\d{1,9}(?:\.\d{1,3})?", re.ASCII)
TIMEOUT_S_MIN: Final = 0.1
TIMEOUT_S_MAX: Final = 86_400.0
_DURATION_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZE_SHIFTS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}


@dataclass(frozen=True)
class Address:
    """A host and port to listen on; port 0 lets the system pick one."""

    host: str
    port: int

    def __str__(self) -> str:
        """Format as `HOST:PORT`, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT` or `[IPV6]:PORT`, either with `tcp://` before it.  InvalidArgument."""
    host, colon, port_text = text.removeprefix("tcp://").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not colon or not bare or (":" in bare) != bracketed or any(c.isspace() or c in "/[]" for c in bare):
        raise InvalidArgument(f"{text!r} is not an address; give HOST:PORT, as 127.0.0.1:9001 or [::1]:9001")
    is_number = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not is_number or int(port_text) > 65535:
        raise InvalidArgument(f"{text!r} is not an address: the port must be a number from 0 to 65535")
    return Address(bare, int(port_text))


def parse_size(text: str) -> int:
    """Return bytes from a number with an optional unit, `4096`, `64K`, `1.5GiB`; units are powers of 1,024.
    InvalidArgument."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is not a size; give a number and a unit, as 64K, 512MiB or 1.5G")
    whole, fraction, unit = match[1], match[2] or "", match[3] or ""
    scaled, rest = divmod(int(whole + fraction) << _SIZE_SHIFTS[unit.lower()], int(f"1{'0' * len(fraction)}"))
    if rest and not unit:
        raise InvalidArgument(f"{text!r} is not a size: a byte has no fractions")
    return scaled


def parse_duration(text: str) -> float:
    """Return seconds from a whole number with a unit, `90s`, `30m`, `12h`, `7d`; `0` needs none.  InvalidArgument."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not (match[2] or int(match[1]) == 0):
        raise InvalidArgument(f"{text!r} is not a time; give a number and a unit, as 90s, 30m, 12h or 7d, or 0")
    return float(int(match[1]) * _DURATION_UNITS.get(match[2] or "s", 1))


def parse_timeout(text: str) -> float:
    """Return seconds from a number of them, `30` or `2.5`, from 0.1 s to a day.  InvalidArgument."""
    if not _SECONDS.fullmatch(text.strip()):
        raise InvalidArgument(f"{text!r} is no number of seconds; give one, as 30 or 2.5")
    return checked_timeout(float(text.strip()))


def checked_timeout(timeout_s: float) -> float:
    """Return a limit of an engine's silence, in seconds.  InvalidArgument unless it is from 0.1 s to a day."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise InvalidArgument(f"timeout is a number of seconds, not {timeout_s!r:.40}")
    if not TIMEOUT_S_MIN <= timeout_s <= TIMEOUT_S_MAX:
        raise InvalidArgument(f"timeout is {timeout_s:g} s; it is {TIMEOUT_S_MIN:g} s to a day")
    return float(timeout_s)


def duration_text(duration_s: float) -> str:
    """Format a time as `parse_duration` takes it, in the largest unit that is exact."""
    whole = int(duration_s)
    if not whole:
        return "0"
    unit = next(unit for unit, length in reversed(_DURATION_UNITS.items()) if whole % length == 0)
    return f"{whole // _DURATION_UNITS[unit]}{unit}"


def parse_path(text: str) -> Path:
    """Return an absolute path, with `~` expanded and links not followed.  InvalidArgument."""
    if not text or "\0" in text:
        raise InvalidArgument(f"{text!r} is not a path")
    try:
        return Path(os.path.abspath(Path(text).expanduser()))  # resolve() would follow links
    except RuntimeError as error:
        raise InvalidArgument(f"{text!r}: {error}") from error


def is_list_of_texts(value: object) -> TypeGuard[Sequence[str]]:
    """Return True for a list of texts, empty or not."""
    return isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)


def folders_text(folders: Sequence[str | Path]) -> str:
    """Return several folders as one text: a JSON list."""
    import json

    return json.dumps([str(folder) for folder in folders], ensure_ascii=False)


def parse_folders(text: str) -> tuple[Path, ...]:
    """Return the folders that a text names: a path, or a JSON list of paths.  InvalidArgument."""
    parts: object = text
    if text.startswith("["):
        import json

        with suppress(ValueError, RecursionError):
            parts = json.loads(text)
    if not is_list_of_texts(parts):
        return (parse_path(text),)
    folders = tuple(parse_path(part) for part in parts)
    if not folders:
        raise InvalidArgument("a list of folders names at least one")
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise InvalidArgument(f"{twice[0]} is given twice")
    return folders


def parse_protection(text: str) -> str:
    """Return the text of a protection, `4+2`.  InvalidArgument for what has another form."""
    if not _PROTECTION.fullmatch(text.strip()):
        raise InvalidArgument(f"{text!r} is no protection; give data and parity shards, as 4+2")
    return text.strip()
