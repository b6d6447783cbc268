"""The readers of what people write: the configuration file, settings, addresses, names, options of the mount, ids.

None of it arrives over a network, but from other tools, from templates and from typing.  It is refused in our own
words, naming what is wrong, and never with a traceback.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cli.mount.options import parse_mount_options
from engine.namespace.keys import check_bucket_name, check_key, lookup_path, split_key
from engine.namespace.versions import checked_version
from lakefs.config import settings as config
from lakefs.errors import LakeError
from lakefs.names import parse_name, parse_object_name
from lakefs.transport.address import parse_address
from tests.fuzz.target import Target

_FILE: Final = Path(f"/proc/self/fd/{os.memfd_create('lake-fuzz')}")
"""A file in memory: on disk, a million inputs would be a million files, and the journal would set the pace."""


def read_config(data: bytes) -> None:
    """Read a configuration file; what was understood is shown in a form that can be given again."""
    _FILE.write_bytes(data)
    found = config.load(file=_FILE, environ={"HOME": "/home/a"})
    shown = found.as_text()
    again = config.load(file="/dev/null", environ={"HOME": "/home/a"}, flags=shown)
    assert again.as_text() == shown


def read_setting(data: bytes) -> None:
    """Read a setting's value as a flag or a variable, by the first byte."""
    if not data:
        return
    name = config.SETTING_NAMES[data[0] % len(config.SETTING_NAMES)]
    text = data[1:].decode(errors="surrogateescape")
    if data[0] & 128:
        if "\0" not in text:
            config.load(file="/dev/null", environ={"HOME": "/home/a", f"LAKE_{name.upper()}": text})
    else:
        shown = config.load(file="/dev/null", environ={}, flags={name: text}).as_text()
        assert config.load(file="/dev/null", environ={}, flags={name: shown[name]}).as_text() == shown


def read_argument(data: bytes) -> None:
    """Read an argument of a command: a name, an address, a size, options of the mount, a version's id."""
    text = data.decode(errors="surrogateescape")
    refused = 0
    last: LakeError | None = None
    for read in _ARGUMENTS:
        try:
            read(text)
        except LakeError as error:
            refused += 1
            last = error
    if refused == len(_ARGUMENTS) and last is not None:
        raise last


def _read_name(text: str) -> None:
    name = parse_name(text)
    parse_object_name(text)
    check_bucket_name(name.bucket)
    assert parse_name(str(name)) == name
    path = check_key(name.key)
    assert lookup_path(name.key) == path
    steps, rest = split_key(path)
    assert all(len(step) < 500 for step in steps)
    assert len(rest) < 500


def _read_engine_address(text: str) -> None:
    address = parse_address(text)
    assert parse_address(str(address)) == address


def _read_size(text: str) -> None:
    assert config.parse_size(text) >= 0


def _read_duration(text: str) -> None:
    seconds = config.parse_duration(text)
    assert config.parse_duration(config.duration_text(seconds)) == seconds


def _read_options(text: str) -> None:
    parse_mount_options([text])


_ARGUMENTS: Final[tuple[Callable[[str], object], ...]] = (
    _read_name,
    _read_engine_address,
    config.parse_address,
    _read_size,
    _read_duration,
    _read_options,
    checked_version,
)
_SETTINGS: Final = (
    b"/var/lib/lake",
    b"/run/lake.sock",
    b"lake",
    b"127.0.0.1:9100",
    b"[::1]:0",
    b"eu-lake-1",
    b"s3.example.org,s3.local",
    b"on",
    b"AES256",
    b"/etc/cert",
    b"/etc/key",
    b"stderr",
    b"1/100",
    b"on",
    b"64M",
    b"off",
    b"debug",
    b"on",
    b"7d",
)
_TEXT_TOKENS: Final = (
    *(
        b":",
        b"/",
        b"..",
        b"[",
        b"]",
        b"://",
        b",",
        b".",
        b"~",
        b"~root/",
        b"off",
        b"\0",
        b"\xff",
        b"\xc3\xa9",
        b"=",
        b" ",
    ),
    *(b"1" * 5000, b"\xd9\xa1", b"KiB", b"TiB", b"0.5", b"1e400", b"nan", b"inf", b"-1", b"d", b"\n", b"@", b"%"),
)
_TOML_TOKENS: Final = (
    *_TEXT_TOKENS,
    *(
        b'"',
        b"'",
        b'"""',
        b"data = ",
        b"native = ",
        b"s3_domains=",
        b"[a]",
        b"[[a]]",
        b"{a=1}",
        b"#",
        b"\\u0000",
        b"\\ud800",
    ),
    *(b"[" * 600, b"a." * 600, b"1979-05-27T00:00:00Z", b"9999-99-99", b"0x", b"true", b"upload_expiry = "),
)
_REFUSED: Final = (LakeError,)
SETTING_TARGETS: Final = (
    Target(
        "config",
        read_config,
        (
            b'data = "/var/lib/lake"\nnative = "127.0.0.1:9100"\ns3 = "off"\nupload_expiry = "30m"\n',
            b's3_tls_cert = "/a"\ns3_tls_key = "/b"\ns3_domains = "a.example,b"\nlog_level = "debug"\n',
        ),
        _TOML_TOKENS,
        _REFUSED,
    ),
    Target(
        "settings",
        read_setting,
        [bytes([number]) + text for number, text in enumerate(_SETTINGS) if number not in (9, 10)],
        _TEXT_TOKENS,
        _REFUSED,
    ),
    Target(
        "arguments",
        read_argument,
        (
            b"lake://bucket/a/key",
            b"bucket/folder/",
            b"unix:/run/lake.sock",
            b"tcp://[::1]:9100",
            b"128MiB",
            b"90s",
            b"ro,noexec,read_ahead=1024,fsname=a,attr_timeout=1.5",
            b"null",
        ),
        _TEXT_TOKENS,
        _REFUSED,
    ),
)
