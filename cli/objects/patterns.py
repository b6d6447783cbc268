"""Patterns of names, as shells have them for files: `models/*.safetensors`, quoted so that no shell takes them first.

`*` and `?` stand for characters but `/`, `[a-z]` and `[!a-z]` for one character, a part `**` for any folders or none.
They stand for a leading dot too.

Rules kept here:
- The literal name wins: a text that names an object, folder or bucket as it is written means that, whatever it has.
- A pattern that nothing matches is an error, and never means itself.
- Only what can match is listed: the parts before a pattern lead to one folder, and each part is matched level by level.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from lakefs.client.facade import driver_of
from lakefs.errors import KeyNotFound, LakeError
from lakefs.names import SCHEME, Name, is_bucket_name

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake

_WILD: Final = re.compile(r"[*?\[]")
ANY_FOLDERS: Final = "**"
STATS_MAX: Final = 1000
"""Names that matched whose stats are asked for at once."""


def is_pattern(text: str) -> bool:
    """Return True if a text may be a pattern."""
    return _WILD.search(text) is not None


def expand(lake: Lake, texts: Sequence[str]) -> list[str]:
    """Return names in place of the patterns among texts; folders among them end in `/`.  KeyNotFound."""
    names: list[str] = []
    for text in texts:
        names += [str(name) for name in matches(lake, text)] if is_meant(lake, text) else [text]
    return names


def is_meant(lake: Lake, text: str) -> bool:
    """Return True if a text is a pattern and nothing has it as its literal name."""
    if not is_pattern(text):
        return False
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    if not is_bucket_name(bucket):
        return True
    driver = driver_of(lake)
    wanted = [Name(bucket, key), Name(bucket, key if key.endswith("/") else key + "/")]
    return all(isinstance(found, LakeError) for found in driver.run(driver.steps.stat_many(wanted)))


def folder_of(pattern: str) -> str:
    """Return the folder that a pattern begins with, with its slash; empty if the bucket is one already."""
    found = _WILD.search(pattern)
    bare = pattern[: found.start() if found else len(pattern)].removeprefix(SCHEME)
    return bare[: bare.rfind("/") + 1]


def matches(lake: Lake, text: str) -> list[Name]:
    """Return the names that a pattern matches, in byte order of each level.  KeyNotFound if there is none."""
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    only_folders = key.endswith("/")
    parts = [part for part in key.split("/") if part]
    buckets = [bucket]
    if is_pattern(bucket):
        buckets = [found.name for found in lake.buckets() if fnmatchcase(found.name, bucket)]
    found = [
        name
        for each in buckets
        for name in (_below(lake, each, "", parts) if parts else [Name(each, "")])
        if name.is_folder or not only_folders
    ]
    if not found:
        raise KeyNotFound(
            f"nothing matches {text}; see what is there with: lake ls {folder_of(text)}".rstrip(), subject=text
        )
    return list(dict.fromkeys(found))


def _below(lake: Lake, bucket: str, folder: str, parts: Sequence[str]) -> Iterator[Name]:
    """Yield the names below a folder (its key is empty or ends in `/`) that the parts of a pattern match."""
    part, *rest = parts
    if part == ANY_FOLDERS:
        yield from _any_below(lake, bucket, folder, rest)
    elif is_pattern(part):
        literal = _WILD.split(part, maxsplit=1)[0]
        for entry in lake.ls(f"{bucket}/{folder}{literal}", delimiter="/", folders=True):
            name = entry.key[len(folder) :].removesuffix("/")
            if not name or not fnmatchcase(name, part):
                continue
            if not rest:
                yield Name(bucket, entry.key)
            elif entry.key.endswith("/"):
                yield from _below(lake, bucket, entry.key, rest)
    elif rest:
        yield from _below(lake, bucket, f"{folder}{part}/", rest)
    else:
        driver = driver_of(lake)
        wanted = [Name(bucket, folder + part), Name(bucket, f"{folder}{part}/")]
        for one, found in zip(wanted, driver.run(driver.steps.stat_many(wanted)), strict=True):
            if not isinstance(found, LakeError):
                yield one
            elif not isinstance(found, KeyNotFound):
                raise found


def _any_below(lake: Lake, bucket: str, folder: str, rest: Sequence[str]) -> Iterator[Name]:
    """Yield the names that `**` and the parts behind it match: all below, or those whose last parts match."""
    for entry in lake.ls(f"{bucket}/{folder}", folders=True):
        below = entry.key[len(folder) :].removesuffix("/")
        if below and _path_matches(rest, below.split("/")):
            yield Name(bucket, entry.key)


def _path_matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Return True if any folders, or none, and then the pattern are the path."""
    if not pattern:
        return True
    reached = set(range(len(path)))
    """Where what is left of the path may begin."""
    for index, part in enumerate(pattern):
        if part == ANY_FOLDERS:
            if index == len(pattern) - 1:
                return any(start < len(path) for start in reached)
            reached = {later for start in reached for later in range(start, len(path))}
        else:
            reached = {start + 1 for start in reached if start < len(path) and fnmatchcase(path[start], part)}
    return len(path) in reached
