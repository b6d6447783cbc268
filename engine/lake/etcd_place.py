"""Where the etcd of a lake is, as an operator says it, and as the record of a machine keeps it.

The record has paths of the files with secrets, never a secret; the files are read when a process opens the etcd.  Which
cluster it is, and which incarnation of the lake's coordinator, is recorded when the lake has moved there, so that an
etcd that came back empty, or as another one, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from engine.coordinator.records import EtcdRecord
from lakefs.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from engine.etcd.etcd_link import EtcdAccess

T = TypeVar("T")
ENDPOINTS_MAX: Final = 9
"""An etcd of more members gains nothing: each change is written by more than half of them."""


class EtcdPlace(EtcdRecord, frozen=True, omit_defaults=True, array_like=False):
    """The etcd of a lake as a machine's record has it.

    `cluster` and `incarnation` are empty until the lake has moved there.  `leaves`: it is to move back.  `is_own`:
    endpoints and files were given for this machine alone.  `left_turn`: the turn of the lake's coordinator that was
    begun without this etcd, which was lost; 0: it was not given up.
    """

    leaves: bool = False
    is_own: bool = False
    left_turn: int = 0

    @property
    def is_settled(self) -> bool:
        """True if the lake has moved there, and is to stay."""
        return bool(self.incarnation) and not self.leaves

    @property
    def words(self) -> str:
        """Words for where it is."""
        return f"the etcd at {','.join(urlsplit(url).netloc for url in self.endpoints)} (lake {self.name})"


def place_of(
    endpoints: str,
    name: str,
    *,
    user: str = "",
    password_file: str = "",
    ca: str = "",
    certificate: str = "",
    key: str = "",
) -> EtcdPlace:
    """Return the place that an operator gives.  InvalidArgument says what is wrong with it."""
    urls = tuple(url.strip() for url in endpoints.split(",") if url.strip())
    if not 0 < len(urls) <= ENDPOINTS_MAX:
        raise InvalidArgument(f"give 1 to {ENDPOINTS_MAX} URLs of the etcd, with commas between", subject=endpoints)
    for url in urls:
        _check_url(url)
    if bool(user) != bool(password_file):
        raise InvalidArgument("a user of etcd has a password: give --etcd-user and --etcd-password-file, or neither")
    if bool(certificate) != bool(key):
        raise InvalidArgument("a certificate has a key: give --etcd-cert and --etcd-key, or neither")
    if (ca or certificate) and not all(url.startswith("https:") for url in urls):
        raise InvalidArgument("certificates are for https://HOST:PORT", subject=endpoints)
    files = _absolute(password_file), _absolute(ca), _absolute(certificate), _absolute(key)
    return EtcdPlace(urls, name, user, *files)


def record_of(place: EtcdPlace) -> EtcdRecord:
    """Return the record of a place for machines that join."""
    fields = msgspec.structs.asdict(place)
    return EtcdRecord(**{field: fields[field] for field in EtcdRecord.__struct_fields__})


def place_in(record: EtcdRecord) -> EtcdPlace:
    """Return the place in a record."""
    return EtcdPlace(**msgspec.structs.asdict(record))


def joined_place(lakes: EtcdPlace, own: EtcdPlace | None) -> EtcdPlace:
    """Return the place of a lake's etcd on a machine that has joined: with endpoints and files of its own, if any."""
    if own is None or not own.is_own:
        return lakes
    return msgspec.structs.replace(own, name=lakes.name, cluster=lakes.cluster, incarnation=lakes.incarnation)


def access_of(place: EtcdPlace) -> EtcdAccess:
    """Return the access, with what is in the files.  Blocks.

    ConfigError for a file that cannot be read, a password that others may read, and where the client of etcd is not
    installed.
    """
    try:
        from engine.etcd.etcd_link import EtcdAccess  # noqa: PLC0415 - optional, and large
    except ImportError as error:
        raise ConfigError(
            f"the client of etcd is not installed ({error.name}); run: pip install 'lakefs-appliance[etcd]'"
        ) from error
    return EtcdAccess(
        place.endpoints,
        ca=_content(place.ca),
        certificate=_content(place.certificate),
        key=_content(place.key),
        user=place.user,
        password=_password(place.password_file),
        cluster=int(place.cluster or "0", 16),
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    is_plain = not (parts.username or parts.password or parts.path.strip("/") or parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or not is_plain:
        raise InvalidArgument(
            "a URL of etcd is http://HOST:PORT or https://HOST:PORT; users and passwords have options of their own",
            subject=parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
        )


def _content(path: str) -> bytes | None:
    """Return the content of a file; None without a path.  ConfigError."""
    return _read(path, Path.read_bytes) if path else None


def _password(path: str) -> str:
    if not path:
        return ""
    if _read(path, Path.stat).st_mode & 0o077:
        raise ConfigError(f"{path} is open to others; run: chmod 600 {path}", subject=path)
    password = _read(path, Path.read_text).strip()
    if not password:
        raise ConfigError(f"{path} is empty; write the password of etcd's user into it", subject=path)
    return password


def _read(path: str, read: Callable[[Path], T]) -> T:
    try:
        return read(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read, and etcd needs it: {error}", subject=path) from error
