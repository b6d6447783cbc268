"""Configuration: one file, `LAKE_*` variables and flags, parsed once into a frozen `Config`.

Rules kept here:
- Each source overrides the one before it: defaults, file, variables, flags.
- An unknown key of the file or flag is an error that names the key, its source and the nearest known one.  Unknown
  variables are ignored (container platforms set `LAKE_...` variables of their own) unless they look like a
  misspelling of a known one.
- Every value is checked here, so nothing else parses settings, and every error says where the value came from.
- An empty variable counts as unset.

Not here: settings of clients alone, `LAKE_SERVER` and `LAKE_TOKEN` (`lakefs.client.address`).  A command that gets no
address imports this module before it connects, so it loads little: no trio, and the TOML parser only if there is a
file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from lakefs.config.values import (
    DEFAULT_FILE as DEFAULT_FILE,
    Address as Address,
    duration_text as duration_text,
    folders_text,
    is_list_of_texts,
    parse_address as parse_address,
    parse_duration as parse_duration,
    parse_folders,
    parse_path,
    parse_protection,
    parse_size as parse_size,
    parse_timeout as parse_timeout,
)
from lakefs.errors import ConfigError, InvalidArgument
from lakefs.limits import (
    ENGINE_SILENCE_S,
    S3_DOMAINS_MAX,
    S3_DOOR_BYTES,
    SCRUB_INTERVAL_S,
    SCRUB_RATE_BYTES_PER_S,
    UPLOAD_EXPIRY_S,
)

SYSTEM_DATA: Final = Path("/var/lib/lake")
SYSTEM_SOCKET: Final = Path("/run/lake/lake.sock")
DEFAULT_S3: Final = Address("127.0.0.1", 9000)
DEFAULT_ADMIN: Final = Address("127.0.0.1", 9001)
DEFAULT_REGION: Final = "us-east-1"
CLIENT_VARIABLES: Final = ("LAKE_CONFIG", "LAKE_SERVER", "LAKE_TOKEN")
"""Variables that are known, and are not settings of the engine."""

FILE_BYTES_MAX: Final = 16 << 10
"""A configuration is a few hundred bytes.  tomllib's cost for a key of many parts grows with their square: this
bounds it to a tenth of a second and about 30 MiB."""
SOCKET_PATH_BYTES_MAX: Final = 107
"""`sun_path` has 108 bytes and ends with a zero."""
SLIP_SIMILARITY: Final = 0.8
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_REGION: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SAMPLE: Final = re.compile(r"1(?:/([1-9]\d{0,8}))?", re.ASCII)
_DEVICE: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}(?::\d{1,3}){0,2}", re.ASCII)
_DOMAIN: Final = re.compile(
    r"(?=.{1,253}$)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
)


NAMES_CHECKPOINT_INTERVAL_S: Final = 3600.0


@dataclass(frozen=True)
class Config:
    """All settings of an engine.  `None` for an address: that port is off."""

    data: Path
    """The store's folder; of a lake on several devices the first one."""
    socket: Path
    devices: tuple[Path, ...] = ()
    """All folders of a lake on several devices, `data` among them; empty for one engine."""
    socket_group: str = ""
    native: Address | None = None
    s3: Address | None = DEFAULT_S3
    s3_region: str = DEFAULT_REGION
    """The region that S3 clients sign for."""
    s3_domains: tuple[str, ...] = ()
    """Host suffixes that follow a bucket's name (virtual-host style)."""
    s3_signature_v2: bool = False
    """True if requests that are signed with version 2 are accepted."""
    s3_accept_sse: str = "off"
    """`AES256` if requests that ask for encryption at rest are done, as the disks are encrypted; else `off`."""
    s3_tls_cert: Path | None = None
    s3_tls_key: Path | None = None
    """Certificate chain and key in PEM; both or neither.  With them S3 is served over TLS only."""
    s3_access_log: str = "off"
    """`off`, `stderr` or an absolute path."""
    s3_access_log_sample: int = 1
    """One in this many requests is logged; the gateway's own errors always."""
    s3_door: bool = True
    """True if answers to S3 GET and HEAD are repeated by native code while nothing has changed."""
    s3_door_memory: int = S3_DOOR_BYTES
    """Most bytes of answers that each process of a gateway keeps to repeat them."""
    admin: Address | None = DEFAULT_ADMIN
    log_level: str = "info"
    strict_permissions: bool = False
    """True if an engine refuses to start when its folders or token are open to others."""
    upload_expiry: float = UPLOAD_EXPIRY_S
    """Seconds until an unfinished multipart upload is removed; 0: never."""
    names_checkpoint_interval: float = NAMES_CHECKPOINT_INTERVAL_S
    """Seconds from one checkpoint of the names in a lake with etcd to the next; 0: there is none."""
    scrub_interval: float = SCRUB_INTERVAL_S
    """Seconds from the end of one full pass of scrub to the start of the next; 0: never in the background."""
    scrub_rate: int = SCRUB_RATE_BYTES_PER_S
    """Bytes per second that a scrub reads; 0: unlimited."""
    io_uring: bool = True
    """True if the disk is read through io_uring, if the kernel allows it."""
    hot_index: str = "auto"
    """`auto`, `off`, `memory` or an absolute path."""
    hot_index_entries: int = 0
    """Chunks that the shared index has room for; 0: it sizes itself."""
    dram_tier_bytes: int | None = None
    """Memory of the DRAM tier; 0: no tier; None: a share of the available memory."""
    rdma: str = "auto"
    """`auto` (beside a TCP listener), `off`, or the name of the RDMA device to use."""
    timeout: float = ENGINE_SILENCE_S
    """Seconds that an engine may be silent while a request of a client waits; for clients, the gateway and mounts."""
    heads: int = 1
    """Processes of a lake that serve clients of this machine; 1: the one that starts all others."""
    protect: str = "4+2"
    """Data and parity shards of a lake on several devices, chosen when it is made."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Source of each setting, for people: `default`, `LAKE_DATA`, `--data`, or the file's path."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """All data folders: one of an engine, several of a lake."""
        return self.devices or (self.data,)

    def as_text(self) -> dict[str, str]:
        """Return the settings as a file or variable would give them, in a fixed order."""
        shown = {name: kind.text(getattr(self, name)) for name, kind in _SETTINGS.items()}
        return shown | {"data": folders_text(self.devices)} if self.devices else shown


def load(
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str | Sequence[str] | None] | None = None,
) -> Config:
    """Return the configuration from file, variables and flags.

    `file` (else `LAKE_CONFIG`) must exist; the default one need not.  `flags` holds setting names; a value of None, or
    an empty list, means that the flag was not given.  ConfigError for anything that cannot be used.
    """
    environ = os.environ if environ is None else environ
    named = file or environ.get("LAKE_CONFIG") or None
    layers = [
        _from_file(Path(named or DEFAULT_FILE), required=named is not None),
        _from_environ(environ),
        _from_flags(flags or {}),
    ]
    given = {name: value for layer in layers for name, value in layer.items()}
    values = {name: _checked(name, given[name]) for name in _SETTINGS if name in given}
    folders = values.pop("data", None) or (default_data_folder(environ),)
    assert isinstance(folders, tuple)
    data = folders[0]
    socket = values.get("socket") or _socket_path(str(default_socket(data, environ)))
    if (values.get("s3_tls_cert") is None) != (values.get("s3_tls_key") is None):
        raise ConfigError("TLS needs both: s3_tls_cert and s3_tls_key", subject="s3_tls_cert")
    origins = {name: given[name].origin if name in given else "default" for name in _SETTINGS}
    values |= {"data": data, "devices": folders if len(folders) > 1 else (), "socket": socket, "origins": origins}
    return Config(**values)  # type: ignore[arg-type]


def default_data_folder(environ: Mapping[str, str] | None = None, *, uid: int | None = None) -> Path:
    """Return `/var/lib/lake` for root and for the service, else `lake` in the user's data folder (XDG
    specification)."""
    environ = os.environ if environ is None else environ
    service_folder = _service_folder(environ, "STATE_DIRECTORY")
    if service_folder:
        return service_folder
    if (os.geteuid() if uid is None else uid) == 0:
        return SYSTEM_DATA
    base = environ.get("XDG_DATA_HOME", "")
    # The specification: relative paths are ignored.
    return (Path(base) if base.startswith("/") else _home(environ) / ".local" / "share") / "lake"


def default_socket(data: Path, environ: Mapping[str, str] | None = None, *, uid: int | None = None) -> Path:
    """Return `/run/lake/lake.sock` for root and for the service, else a path in the user's run folder or the data
    folder."""
    environ = os.environ if environ is None else environ
    service_folder = _service_folder(environ, "RUNTIME_DIRECTORY")
    if service_folder:
        return service_folder / "lake.sock"
    if (os.geteuid() if uid is None else uid) == 0:
        return SYSTEM_SOCKET
    run_folder = environ.get("XDG_RUNTIME_DIR", "")
    return (Path(run_folder) if run_folder.startswith("/") else data) / "lake.sock"


@dataclass(frozen=True)
class _Given:
    """A value as given, and its source."""

    value: object
    origin: str


def _from_file(path: Path, *, required: bool) -> dict[str, _Given]:
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path}: there is no such configuration file", subject=str(path)) from None
        return {}
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path}: the configuration cannot be read: {reason}", subject=str(path)) from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: not a configuration: it is larger than {FILE_BYTES_MAX} bytes", subject=str(path))
    table = _parse_toml(path, content)
    for name in table:
        if name not in _SETTINGS:
            raise ConfigError(f"{path}: unknown key {name!r}{_nearest(name)}", subject=name)
    return {name: _Given(value, str(path)) for name, value in table.items()}


def _parse_toml(path: Path, content: bytes) -> dict[str, object]:
    import tomllib

    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a plain ValueError
        raise ConfigError(f"{path}: not valid TOML: {error}", subject=str(path)) from error


def _from_environ(environ: Mapping[str, str]) -> dict[str, _Given]:
    found: dict[str, _Given] = {}
    for variable, value in environ.items():
        if not variable.startswith("LAKE_") or variable in CLIENT_VARIABLES or not value:
            continue
        name = variable.removeprefix("LAKE_").lower()
        if variable == f"LAKE_{name.upper()}" and name in _SETTINGS:
            found[name] = _Given(value, variable)
            continue
        known = [f"LAKE_{known.upper()}" for known in _SETTINGS] + list(CLIENT_VARIABLES)
        slip = _closest(variable, known, len("LAKE_"))
        if slip:
            raise ConfigError(f"unknown variable {variable}; did you mean {slip}?", subject=variable)
    return found


def _from_flags(flags: Mapping[str, str | Sequence[str] | None]) -> dict[str, _Given]:
    for name in flags:
        if name not in _SETTINGS:
            raise ConfigError(f"unknown flag --{name}{_nearest(name)}", subject=name)
    return {
        name: _Given(value, f"--{name.replace('_', '-')}") for name, value in flags.items() if value not in (None, ())
    }


def _nearest(name: str) -> str:
    import difflib

    nearest = difflib.get_close_matches(name.lower().replace("-", "_"), list(_SETTINGS), n=1, cutoff=0.0)
    return f"; the nearest known one is {nearest[0]!r} (all: {', '.join(_SETTINGS)})"


def _closest(text: str, known: list[str], prefix_length: int) -> str | None:
    import difflib

    by_tail = {name[prefix_length:]: name for name in known}
    near = difflib.get_close_matches(text[prefix_length:].upper(), list(by_tail), n=1, cutoff=SLIP_SIMILARITY)
    return by_tail[near[0]] if near else None


def _checked(name: str, given: _Given) -> object:
    value = folders_text(given.value) if name == "data" and is_list_of_texts(given.value) else given.value
    if isinstance(value, bool) and _SETTINGS[name].is_switch:
        value = _SETTINGS[name].text(value)
    if not isinstance(value, str):
        raise ConfigError(f"{given.origin}: {name} must be text in quotes, not {type(value).__name__}", subject=name)
    try:
        return _SETTINGS[name].parse(value)
    except InvalidArgument as error:
        where = given.origin if given.origin.startswith(("-", "LAKE_")) else f"{given.origin}: {name}"
        raise ConfigError(f"{where}: {error.message}", subject=name) from error


def _socket_path(text: str) -> Path:
    path = parse_path(text.removeprefix("unix:"))
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"{path}: a socket's path ends at {SOCKET_PATH_BYTES_MAX} bytes; set `socket` to a shorter one",
            subject=str(path),
        )
    return path


def _group(text: str) -> str:
    if text and not (text.isascii() and text.replace("-", "").replace("_", "").replace(".", "").isalnum()):
        raise InvalidArgument(f"{text!r} is not the name of a group")
    return text


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text.strip(), re.ASCII):
        raise InvalidArgument(f"{text!r} is no count; give a whole number, as 10000000")
    return int(text.strip())


HEADS_MAX: Final = 64
"""Processes of a lake that serve clients of one machine: each takes some 100 MiB, and a processor when it is busy."""


def _heads(text: str) -> int:
    if not 1 <= (count := _count(text)) <= HEADS_MAX:
        raise InvalidArgument(f"a lake's machine has 1 to {HEADS_MAX} heads, not {count}")
    return count


def _sample(text: str) -> int:
    match = _SAMPLE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is no share of requests; give 1/N, as 1/100, or 1 for all")
    return int(match[1] or 1)


def _region(text: str) -> str:
    if not _REGION.fullmatch(text):
        raise InvalidArgument(f"{text!r} is no region; it has lower-case letters, digits and -, as us-east-1")
    return text


def _domains(text: str) -> tuple[str, ...]:
    names = [part.strip().lower().removeprefix("*").strip(".") for part in text.split(",") if part.strip()]
    for name in names:
        if not _DOMAIN.fullmatch(name):
            raise InvalidArgument(f"{name!r} is no host name; give suffixes as s3.example.org,s3.local")
    if len(names) > S3_DOMAINS_MAX:
        raise InvalidArgument(f"{len(names)} domains; {S3_DOMAINS_MAX} are allowed")
    return tuple(sorted(set(names), key=lambda name: (-len(name), name)))  # the longest match counts


def _log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise InvalidArgument(f"{text!r} is no log level; the levels are {', '.join(LOG_LEVELS)}")
    return text.lower()


def _service_folder(environ: Mapping[str, str], variable: str) -> Path | None:
    """Return the folder called `lake` that the service manager made (systemd.exec(5)); other units have others."""
    folders = [Path(folder) for folder in environ.get(variable, "").split(":") if folder.startswith("/")]
    return next((folder for folder in folders if folder.name == "lake"), None)


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    return Path(home) if home.startswith("/") else Path(os.path.expanduser("~"))  # never raises


class _Kind(NamedTuple):
    """A kind of setting: how text is parsed, and how a value is shown as text."""

    parse: Callable[[str], object]
    text: Callable[[Any], str] = str
    is_switch: bool = False
    """A file may say true or false, too."""


def _or(word: str, parse: Callable[[str], object]) -> _Kind:
    """Return the kind of a setting that is None when the text is `word`."""
    return _Kind(
        lambda text: None if text.lower() == word else parse(text), lambda value: word if value is None else str(value)
    )


def _word_or_path(*words: str) -> _Kind:
    return _Kind(lambda text: text.lower() if text.lower() in words else str(parse_path(text)))


def _rdma(text: str) -> str:
    if text.lower() in ("auto", "off"):
        return text.lower()
    if not _DEVICE.fullmatch(text):
        raise InvalidArgument(f"{text!r} is not auto, off, or the name of an RDMA device; see them with: rdma link")
    return text


def _sse(text: str) -> str:
    if text not in ("off", "AES256"):
        raise InvalidArgument(f"{text!r} is neither AES256 nor off")
    return text


def _switch(on: str) -> _Kind:
    """Return the kind of a setting that is True when the text is `on`, False when it is `off`."""

    def parse(text: str) -> bool:
        if text.lower() not in (on, "off"):
            raise InvalidArgument(f"{text!r} is neither {on} nor off")
        return text.lower() == on

    return _Kind(parse, lambda value: on if value else "off", True)


_SETTINGS: Final[Mapping[str, _Kind]] = {
    "data": _Kind(parse_folders),
    "socket": _Kind(_socket_path),
    "socket_group": _Kind(_group),
    "native": _or("off", parse_address),
    "s3": _or("off", parse_address),
    "s3_region": _Kind(_region),
    "s3_domains": _Kind(_domains, ",".join),
    "s3_signature_v2": _switch("on"),
    "s3_accept_sse": _Kind(_sse),
    "s3_tls_cert": _or("", parse_path),
    "s3_tls_key": _or("", parse_path),
    "s3_access_log": _word_or_path("off", "stderr"),
    "s3_access_log_sample": _Kind(_sample, "1/{}".format),
    "s3_door": _switch("on"),
    "s3_door_memory": _Kind(parse_size),
    "admin": _or("off", parse_address),
    "log_level": _Kind(_log_level),
    "strict_permissions": _switch("on"),
    "upload_expiry": _Kind(parse_duration, duration_text),
    "names_checkpoint_interval": _Kind(parse_duration, duration_text),
    "scrub_interval": _Kind(parse_duration, duration_text),
    "scrub_rate": _Kind(parse_size),
    "io_uring": _switch("auto"),
    "hot_index": _word_or_path("auto", "off", "memory"),
    "hot_index_entries": _Kind(_count),
    "dram_tier_bytes": _or("auto", parse_size),
    "rdma": _Kind(_rdma),
    "timeout": _Kind(parse_timeout, "{:g}".format),
    "heads": _Kind(_heads),
    "protect": _Kind(parse_protection),
}
SETTING_NAMES: Final = tuple(_SETTINGS)
"""Keys of the file; flags have the same name with `-`, variables `LAKE_` and upper case."""
