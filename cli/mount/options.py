"""The text behind `-o`, of `lake mount`, of mount(8) and of /etc/fstab: one table of known options.

An option is ours, or the kernel's and passed on, or one that mount(8) passes to every helper and that has no effect
here.  Any other is refused, with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Final

from lakefs.config.settings import parse_size
from lakefs.errors import InvalidArgument

KERNEL: Final = frozenset({"noexec", "noatime", "nodiratime", "dirsync"})
"""Options passed on.  A mount is always nosuid and nodev: a bucket must not grant rights on this machine."""
WITHOUT_EFFECT: Final = frozenset({
    "defaults", "auto", "noauto", "user", "users", "nouser", "owner", "group", "nofail", "_netdev", "suid",
    "nosuid", "dev", "nodev", "atime", "diratime", "relatime", "norelatime", "strictatime", "nostrictatime",
    "lazytime", "nolazytime", "loud", "silent", "default_permissions", "mand", "nomand", "iversion", "noiversion",
    "symfollow", "nousers", "nogroup", "noowner",
})  # fmt: skip
WITHOUT_EFFECT_PREFIXES: Final = ("x-", "X-", "comment=", "user=")
FLAGS: Final = {
    "ro": "read_only",
    "sync": "sync",
    "allow_other": "allow_other",
    "nonempty": "may_hold_files",
    "debug": "debug",
    "hot_forced": "hot_forced",
    "append_forced": "append_forced",
}
"""`hot_forced` and `append_forced` are for tests."""
TAKEN_BACK: Final = {"rw": "read_only", "async": "sync"}
"""The later of two contradicting options wins, as in other mounts."""
RETRY_MINUTES_MAX: Final = 10_000
"""A week, nearly; what nfs(5) has for mounts in the background."""
READ_AHEAD_KIB_MAX: Final = 1 << 20
"""1 GiB: more than any reader uses, and far below the limit of the kernel's page counts."""


def parse_mount_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return the options, by MountOptions' field names, or `server`, `token_file` and `retry_s`.  InvalidArgument."""
    found: dict[str, Any] = {}
    kernel: set[str] = set()
    for option in (part.strip() for text in texts for part in text.split(",")):
        name, equals, value = option.partition("=")
        if not option or option in WITHOUT_EFFECT or option.startswith(WITHOUT_EFFECT_PREFIXES):
            continue
        elif option in KERNEL:
            kernel.add(option)
        elif option == "exec":
            kernel.discard("noexec")
        elif option in FLAGS:
            found[FLAGS[option]] = True
        elif option in TAKEN_BACK:
            found.pop(TAKEN_BACK[option], None)
        elif equals and name in VALUES:
            field, parse = VALUES[name]
            found[field] = parse(name, value)
        else:
            raise _unknown(option)
    return found | ({"kernel_options": frozenset(kernel)} if kernel else {})


def parse_read_ahead(name: str, text: str) -> int:
    """Parse KiB of read-ahead."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9) or int(text) > READ_AHEAD_KIB_MAX:
        raise InvalidArgument(f"{name}={text}: give KiB, a number up to {READ_AHEAD_KIB_MAX}")
    return int(text)


def parse_byte_count(name: str, text: str) -> int:
    """Parse bytes, with an optional unit."""
    try:
        return parse_size(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error.message}") from error


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise InvalidArgument(f"{name}={text}: give seconds, from 0 to 86400")
    return seconds


def _minutes(name: str, text: str) -> float:
    """Parse minutes, the unit of nfs(5)'s option of that name; returns seconds."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes <= RETRY_MINUTES_MAX:
        raise InvalidArgument(f"{name}={text}: give minutes, from 0 to {RETRY_MINUTES_MAX}")
    return minutes * 60


def _text(name: str, text: str) -> str:
    if not text:
        raise InvalidArgument(f"{name}= needs a value")
    return text


def _on_or_off(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise InvalidArgument(f"{name}={text}: give on or off")
    return text == "on"


VALUES: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    "bucket": ("bucket", _text),
    "server": ("server", _text),
    "token_file": ("token_file", _text),
    "staging": ("staging", _text),
    "staging_size": ("staging_bytes", parse_byte_count),
    "hot_memory": ("hot_bytes", parse_byte_count),
    "read_ahead": ("read_ahead_kib", parse_read_ahead),
    "attr_timeout": ("attribute_timeout_s", _seconds),
    "entry_timeout": ("entry_timeout_s", _seconds),
    "engine_wait": ("engine_wait_s", _seconds),
    "engine_silence": ("engine_silence_s", _seconds),
    "retry": ("retry_s", _minutes),
    "stop_wait": ("stop_wait_s", _seconds),
    "fsname": ("source", _text),
    "native": ("native", _on_or_off),
}


def _unknown(option: str) -> InvalidArgument:
    if option.split("=")[0] == "remount":
        return InvalidArgument("a lake mount cannot be remounted; unmount it and mount it again", subject=option)
    if option in VALUES:
        return InvalidArgument(f"the mount option {option} needs a value: -o {option}=VALUE", subject=option)
    if option == "allow_root":
        return InvalidArgument("allow_root is not offered; use -o allow_other", subject=option)
    known = [*FLAGS, *VALUES, *sorted(KERNEL)]
    nearest = difflib.get_close_matches(option.split("=")[0], known, n=1, cutoff=0.0)
    return InvalidArgument(
        f"unknown mount option {option!r}; the nearest known one is {nearest[0]!r} (all: {', '.join(known)})",
        subject=option,
    )
