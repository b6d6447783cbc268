"""`lake sync --watch`: passes of a sync, one whenever the source has changed, until Ctrl-C.

A bucket is followed by the engine's watch; a folder is read again every few seconds, which finds every change, on any
file system, whoever made it.

Rules kept here:
- What changes during a pass leads to another pass.
- An engine that is gone is waited for: the pass is tried again until it is there.
- The passes run in the main thread, so Ctrl-C ends them like any command.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from cli.terminal.output import notice
from lakefs.errors import EngineUnreachable, InvalidArgument, LakeError, LocalFileError

if TYPE_CHECKING:
    from cli.moving.sides import Place
    from lakefs.names import Name
    from lakefs.sync.filters import Rules
    from lakefs.sync.report import SyncTotals

READ_EVERY_S: Final = 2.0
SETTLE_S: Final = 0.3
"""Time for changes that follow each other, so that one pass takes them all."""
TRY_AGAIN_S: Final = 5.0
"""Time before a pass in which something failed is tried again."""
_END_S: Final = 5.0


def follow_source(
    source: Place, rules: Rules, once: Callable[[], SyncTotals], *, is_embedded: bool, token: str | None, follow: bool
) -> SyncTotals:
    """Run a pass now, and another whenever the source has changed; return the last one's totals after Ctrl-C."""
    if is_embedded and not source.is_folder:
        raise InvalidArgument("--watch of a bucket needs an engine; with --data nobody else changes it")
    last = once()
    with suppress(KeyboardInterrupt):
        if source.is_folder:
            for _ in _changes_of_folder(source.text, rules, follow):
                last = _tried(once, last)
        else:
            with _changes_of_bucket(source.lake.address, token, source.name) as changed:
                while True:
                    last = _tried(once, last)
                    changed.wait()
                    changed.clear()
                    time.sleep(SETTLE_S)
    return last


def _tried(once: Callable[[], SyncTotals], last: SyncTotals) -> SyncTotals:
    """Run a pass, again until the engine is there; return its totals."""
    is_noted = False
    while True:
        try:
            return once()
        except (EngineUnreachable, LocalFileError) as error:
            if not is_noted:
                notice(f"lake: {error.message}; trying again")
                is_noted = True
            time.sleep(TRY_AGAIN_S)


def _changes_of_folder(root: str, rules: Rules, follow: bool) -> Iterator[None]:
    """Yield whenever a folder is not what it was; first at once, for what changed before this began."""
    before = b""
    while True:
        found = _fingerprint(root, rules, follow)
        if found != before:
            yield
            before = found
        time.sleep(READ_EVERY_S)


def _fingerprint(root: str, rules: Rules, follow: bool) -> bytes:
    """Return a hash of the names, sizes, times and modes in a folder; b"" if it cannot be read."""
    from lakefs.sync.sides import FolderSide

    side = FolderSide(root, rules, follow)
    digest = hashlib.blake2b()
    with suppress(LocalFileError):
        while (page := side.read_page()) is not None:
            for entry in page:
                line = f"{entry.path}\0{entry.size_bytes}\0{entry.mtime_ns}\0{entry.mode}\0{entry.refusal}\n"
                digest.update(line.encode(errors="surrogateescape"))
        return digest.digest()
    return b""


@contextmanager
def _changes_of_bucket(address: str, token: str | None, name: Name) -> Iterator[threading.Event]:
    """Context manager: an event that is set whenever something below a name may have changed."""
    import trio

    changed = threading.Event()
    is_watching = threading.Event()
    scope = trio.CancelScope()
    lake_token: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        lake_token.append(trio.lowlevel.current_trio_token())
        with scope:
            while True:
                with suppress(LakeError):
                    await _watch(address, token, name, changed, is_watching)
                changed.set()  # events in between are lost
                await trio.sleep(TRY_AGAIN_S)

    thread = threading.Thread(target=trio.run, args=(main,), name="lake-watch", daemon=True)
    thread.start()
    is_watching.wait(_END_S)
    try:
        yield changed
    finally:
        with suppress(trio.RunFinishedError):
            lake_token[0].run_sync_soon(scope.cancel)
        thread.join(_END_S)


async def _watch(
    address: str, token: str | None, name: Name, changed: threading.Event, is_watching: threading.Event
) -> None:
    """Set `changed` for each event below a name, until the watch ends."""
    from lakefs.client.connect_trio import connect_trio

    async with connect_trio(address, token=token, repeats=False) as lake, lake.watch(name.bucket) as events:
        is_watching.set()
        changed.set()
        async for event in events:
            keys = ((event.bucket, event.key), (event.to_bucket, event.to_key))
            is_below = any(bucket == name.bucket and _touches(key, name.key) for bucket, key in keys)
            if is_below or event.kind == "resync":
                changed.set()


def _touches(key: str, prefix: str) -> bool:
    """Return True if the change of a key may change what is below a prefix: it is below it, or a folder above it."""
    return key.startswith(prefix) or (key.endswith("/") and prefix.startswith(key))
