"""The sides of `lake sync` and `lake diff`: which text is a local folder, and which a name in the lake.

Rules kept here:
- A text that begins with `/`, `./` or `../` (also `.` and `..`) is a folder, and one that begins with `lake://` a name.
- Any other text is what exists.  If both exist, or the target could be made as either, the command is refused: a wrong
  guess could remove files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cli.terminal.target import Target
from lakefs.client.facade import driver_of
from lakefs.errors import BucketNotFound, InvalidArgument

if TYPE_CHECKING:
    from lakefs.client.blocking.driver import BlockingDriver
    from lakefs.client.blocking.lake import Lake
    from lakefs.names import Name
    from lakefs.sync.filters import Rules
    from lakefs.sync.sides import Side

SCHEME = "lake://"


@dataclass(frozen=True)
class Place:
    """A side as the user named it.  `lake`: the lake that a name of it is in; `is_folder`: it is a local folder."""

    text: str
    lake: Lake
    is_folder: bool
    is_source: bool

    @property
    def name(self) -> Name:
        """The name in the lake; its key is empty, or ends in a slash."""
        from lakefs.names import Name, parse_name

        name = parse_name(self.text)
        return name if name.is_folder else Name(name.bucket, name.key + "/")


@dataclass(frozen=True)
class Lakes:
    """The lakes of both sides; `target` is another one than `source` with --to-server."""

    source: Lake
    target: Lake

    @property
    def are_two(self) -> bool:
        """True if the sides are in lakes of two engines."""
        return self.source is not self.target


@contextlib.contextmanager
def open_lakes(
    where: Target, to_server: str | None, to_token_file: Path | None, *, source: str = ""
) -> Iterator[Lakes]:
    """Context manager: the lakes of both sides.  Two addresses of one engine are one lake.

    With --data, a store is made if it is missing and `source` is a folder.
    """
    is_made = to_server is None and _is_folder(source) is not False and os.path.isdir(source)
    with contextlib.ExitStack() as stack:
        lake = stack.enter_context(where.open(create=is_made))
        if to_server is None:
            yield Lakes(lake, lake)
            return
        other = stack.enter_context(Target(to_server, None, to_token_file).open())
        is_same = lake.status()["store_id"] == other.status()["store_id"]
        yield Lakes(other if is_same else lake, other)


def places_of(source: str, target: str, lakes: Lakes) -> tuple[Place, Place]:
    """Return both sides.  InvalidArgument for one that could be either, BucketNotFound for a source that is neither."""
    from lakefs.names import check_path, parse_name

    from_folder = _is_folder(source)
    to_folder = _is_folder(target)
    if from_folder is None and to_folder is True:
        from_folder = False
    if from_folder is None:
        from_folder = _found(source, lakes.source)
        if from_folder is None:
            bucket = source.partition("/")[0]
            raise BucketNotFound(
                f"{source}: there is neither such a folder here nor a bucket {bucket}; see the buckets with: lake ls",
                subject=source,
            )
    if to_folder is None:
        to_folder = False if from_folder else _found(target, lakes.target)
        if to_folder is None:
            raise InvalidArgument(
                f"{target}: there is neither such a folder here nor such a bucket; "
                f"to make one, write ./{target} for the folder or {SCHEME}{target} for the bucket",
                subject=target,
            )
    for text, is_folder in ((source, from_folder), (target, to_folder)):
        if is_folder:
            _refuse_mounted(text)
    if from_folder and to_folder:
        raise InvalidArgument(
            f"{source} and {target} are both local folders; one side must be in the lake, as {SCHEME}BUCKET/PREFIX",
            subject=source,
        )
    if not to_folder:
        check_path(parse_name(target))
    return (
        Place(source, lakes.source, from_folder, is_source=True),
        Place(target, lakes.target, to_folder, is_source=False),
    )


def runner_of(source: Place, target: Place) -> BlockingDriver:
    """Return the driver that runs the steps: that of the target's lake, or of the one lake that there is."""
    return driver_of(source.lake if target.is_folder else target.lake)


def side_of(place: Place, other: Place, rules: Rules, *, follow: bool = False, may_miss: bool = False) -> Side:
    """Return a side that can be listed.  A source in another lake than the target's is asked by its own client."""
    from lakefs.sync.sides import BucketSide, FolderSide

    if place.is_folder:
        prefix_bytes = len(other.name.key.encode())
        refused = frozenset(_identities(place, other))
        return FolderSide(place.text, rules, follow, prefix_bytes, refused, may_miss, _lake_mounts())
    driver = driver_of(place.lake)
    is_elsewhere = place.is_source and not other.is_folder and place.lake is not other.lake
    return BucketSide(
        driver.steps, place.name, rules, other.is_folder, may_miss, runner=driver if is_elsewhere else None
    )


def _is_folder(text: str) -> bool | None:
    """Return True if a text says that it is a folder, False if it says a name, None if it says neither."""
    if text.startswith(SCHEME):
        return False
    return True if text in (".", "..") or text.startswith(("/", "./", "../")) else None


def _found(text: str, lake: Lake) -> bool | None:
    """Return True if only a folder has a name, False if only a bucket has it, None if neither.  InvalidArgument."""
    from lakefs.names import is_bucket_name, parse_name

    is_folder = os.path.isdir(text)
    bucket = parse_name(text).bucket
    is_bucket = is_bucket_name(bucket) and lake.exists(f"{bucket}/")
    if is_folder and is_bucket:
        raise InvalidArgument(
            f"{text} is a folder here, and {bucket} is a bucket; write ./{text} or {SCHEME}{text}", subject=text
        )
    return is_folder if is_folder or is_bucket else None


def _refuse_mounted(folder: str) -> None:
    """Raise InvalidArgument for a folder in a mount of a lake: the sync might copy what it writes, without end."""
    from fuse.kernel.mount_point import LAKE_TYPE, all_mounts

    existing = os.path.abspath(folder)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    device = os.stat(existing).st_dev
    if any(entry.type == LAKE_TYPE for entry in all_mounts(f"{os.major(device)}:{os.minor(device)}")):
        raise InvalidArgument(
            f"{folder} is in a mount of a lake; name what it shows as {SCHEME}BUCKET/PREFIX", subject=folder
        )


def _lake_mounts() -> frozenset[int]:
    """Return the devices of the mounts of lakes on this machine."""
    from fuse.kernel.mount_point import LAKE_TYPE, all_mounts

    devices = (entry.device.split(":") for entry in all_mounts() if entry.type == LAKE_TYPE)
    return frozenset(os.makedev(int(major), int(minor)) for major, minor in devices)


def _identities(place: Place, other: Place) -> Iterator[tuple[int, int]]:
    """Yield device and inode of each data folder of the other side's store on this machine."""
    status = other.lake.status()
    for data in [status.get("data"), *[each.get("folder") for each in status.get("folders", ())]]:
        if not isinstance(data, str):
            continue
        with contextlib.suppress(OSError):
            found = os.stat(data)
            yield found.st_dev, found.st_ino
            inside = os.path.realpath(place.text)
            if inside.startswith(os.path.realpath(data) + os.sep):
                raise InvalidArgument(f"{place.text} is inside the store's data folder {data}", subject=place.text)
