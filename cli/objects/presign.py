"""`lake presign`: a URL that gives one S3 request on one object to whoever has it, until it expires.

Nothing is asked of an engine, unless the secret is not at hand: the URL is signed here.

Source of the signature: "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)" of the S3 API
reference.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import click

from cli.terminal.completing import complete_names
from cli.terminal.output import iso_time, json_option, notice, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import AccessKeyNotFound, InvalidArgument, LocalFileError
from lakefs.limits import S3_PRESIGN_S_MAX
from lakefs.names import Name, parse_object_name

METHODS: Final = ("GET", "PUT", "HEAD", "DELETE")
_EVERY_ADDRESS: Final = ("0.0.0.0", "::", "")
_DAY: Final = "%Y%m%d"
_TIME: Final = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True)
class Signing:
    """Key, place and region that a URL is signed for.  `endpoint`: scheme, host and port."""

    access_key: str
    secret_key: str
    endpoint: str
    region: str

    def __repr__(self) -> str:
        return f"Signing({self.access_key!r}, {self.endpoint!r}, {self.region!r})"


def presigned(signing: Signing, name: Name, method: str, expires_s: int, now_s: float, version: str = "") -> str:
    """Return the URL of a request on an object, path style, signed over its host."""
    moment = time.gmtime(now_s)
    scope = f"{time.strftime(_DAY, moment)}/{signing.region}/s3/aws4_request"
    parts = urlsplit(signing.endpoint)
    host = _sent_host(parts.scheme, parts.netloc)
    path = quote(f"{parts.path.rstrip('/')}/{name.bucket}/{name.key}", safe="/~")
    query = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{signing.access_key}/{scope}",
        "X-Amz-Date": time.strftime(_TIME, moment),
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": "host",
    } | ({"versionId": version} if version else {})
    shown = "&".join(f"{key}={quote(value, safe='~')}" for key, value in sorted(query.items()))
    canonical = f"{method}\n{path}\n{shown}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    to_sign = "\n".join(("AWS4-HMAC-SHA256", query["X-Amz-Date"], scope, sha256(canonical.encode()).hexdigest()))
    key = b"AWS4" + signing.secret_key.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    return f"{parts.scheme}://{host}{path}?{shown}&X-Amz-Signature={signature}"


def _sent_host(scheme: str, netloc: str) -> str:
    """Return the Host header that clients send: in small letters, without the port that the scheme has anyway."""
    return netloc.lower().removesuffix({"http": ":80", "https": ":443"}[scheme])


@click.command()
@click.argument("name", metavar="BUCKET/KEY", shell_complete=complete_names)
@click.option("--method", type=click.Choice(METHODS, case_sensitive=False), default="GET", show_default=True)
@click.option("--expires", metavar="TIME", default="1h", show_default=True, help="As 90s, 12h or 7d, the longest.")
@click.option("--version", metavar="VERSION", default="", help="Of this version of the object.")
@click.option(
    "--endpoint-url", metavar="URL", help="Where S3 is served; else AWS_ENDPOINT_URL, else the configuration."
)
@click.option("--access-key", metavar="KEY", help="Else AWS_ACCESS_KEY_ID.")
@click.option("--secret-file", type=click.Path(path_type=Path), metavar="FILE", help="Else AWS_SECRET_ACCESS_KEY.")
@click.option("--region", metavar="REGION", help="Else AWS_REGION, else the configuration's.")
@json_option
@engine_options
@pass_target
def presign(
    where: Target,
    name: str,
    method: str,
    expires: str,
    version: str,
    endpoint_url: str | None,
    access_key: str | None,
    secret_file: Path | None,
    region: str | None,
    as_json: bool,
) -> None:
    """Print a URL with which anybody may GET an object, or PUT one, until it expires.

    It is signed with an access key (lake key create), and allows what that key may do. Without a secret the engine is
    asked for that of the key. Nothing looks whether the object exists. Use it: curl URL; curl -T FILE URL
    """
    signing = Signing(*_key(where, access_key, secret_file), *_place(endpoint_url, region))
    expires_s, now_s = _expiry(expires), time.time()
    url = presigned(signing, parse_object_name(name), method.upper(), expires_s, now_s, version)
    if as_json:
        write_json({"url": url, "method": method.upper(), "expires": iso_time(int((now_s + expires_s) * 1e9))})
    else:
        write_line(url)


def _expiry(text: str) -> int:
    from lakefs.config.values import parse_duration

    found = int(parse_duration(text))
    if not 1 <= found <= S3_PRESIGN_S_MAX:
        raise InvalidArgument(f"a URL holds from 1s to {S3_PRESIGN_S_MAX // 86_400}d, not {text}")
    return found


def _key(where: Target, access_key: str | None, secret_file: Path | None) -> tuple[str, str]:
    """Return the access key and its secret: of the options, the environment, or the engine."""
    own = os.environ.get("AWS_ACCESS_KEY_ID", "")
    wanted = access_key or own
    if not wanted:
        raise InvalidArgument(
            "no access key; give --access-key or AWS_ACCESS_KEY_ID, and make one with: lake key create"
        )
    if secret_file is not None:
        try:
            return wanted, secret_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise LocalFileError(f"{secret_file}: {reason}", subject=str(secret_file)) from error
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if secret and wanted == own:
        return wanted, secret
    with where.open() as lake:
        found = lake.find_access_key(wanted)
    if found is None:
        raise AccessKeyNotFound(f"there is no access key {wanted}; see: lake key ls", subject=wanted)
    return wanted, found.secret_key


def _place(endpoint_url: str | None, region: str | None) -> tuple[str, str]:
    """Return endpoint and region: of the options, the environment, or the configuration."""
    from lakefs.config.settings import Config, load

    found: Config | None = None
    endpoint = endpoint_url or _first(os.environ, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    region = region or _first(os.environ, "AWS_REGION", "AWS_DEFAULT_REGION")
    if not endpoint or not region:
        found = load()
    if not endpoint:
        assert found is not None
        endpoint = _configured(found.s3, is_tls=found.s3_tls_cert is not None)
    parts = urlsplit(endpoint)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or "@" in parts.netloc
        or parts.query
        or parts.fragment
    ):
        raise InvalidArgument(f"{endpoint!r} is no URL of an endpoint; give one as http://127.0.0.1:9000")
    return endpoint, region or (found.s3_region if found is not None else "")


def _configured(address: object, *, is_tls: bool) -> str:
    from lakefs.config.values import Address

    if not isinstance(address, Address) or not address.port:
        raise InvalidArgument("the configuration says no port for S3; give --endpoint-url")
    host = address.host
    if host in _EVERY_ADDRESS:
        host = "127.0.0.1"
        notice("lake: the URL is for this machine; for others give --endpoint-url")
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{address.port}"


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")
