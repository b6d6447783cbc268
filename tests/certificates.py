"""A certificate authority for tests, made by openssl, and a network whose streams are sealed."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

from gateway.http.tls import TlsListener, TlsStream, load_pair
from lakefs.ports import Listener, Stream
from lakefs.transport.streams import TrioNetwork

HOST = "127.0.0.1"
CA_FILE = "ca.pem"


class Authority:
    """A CA in a folder; `path` is its certificate, for clients to trust."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / CA_FILE
        self._key = folder / "ca.key"
        self._folder = folder
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=lake tests", "-keyout", self._key, "-out", self.path),
            *("-addext", "keyUsage=critical,keyCertSign"),
        )

    def issue(self, name: str, certificate: Path, key: Path, hosts: str = f"IP:{HOST},DNS:localhost") -> None:
        """Write a new pair; `name` is the certificate's subject.  Each file is replaced in one step."""
        new_key, request, new = (self._folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", new_key, "-out", request),
        )
        extensions = self._folder / "extensions"
        extensions.write_text(f"subjectAltName={hosts}\n")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.path, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", "2", "-extfile", extensions, "-out", new),
        )
        new_key.replace(key)
        new.replace(certificate)


def encrypt(key: Path, to: Path) -> None:
    """Write the same key behind a password."""
    _openssl("pkey", "-in", key, "-aes128", "-passout", "pass:secret", "-out", to)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class TlsNetwork:
    """The operating system's network with TLS over it; both ends trust one authority."""

    def __init__(self, folder: Path) -> None:
        certificate, key = folder / "c.pem", folder / "k.pem"
        if not certificate.exists():
            Authority(folder).issue("contract", certificate, key)
        self._server = load_pair(certificate, key)
        self._client = ssl.create_default_context(cafile=str(folder / CA_FILE))
        self._network = TrioNetwork()

    def current(self) -> ssl.SSLContext:
        return self._server

    async def listen(self, address: str) -> Listener:
        return TlsListener(await self._network.listen(address), self.current)

    async def connect(self, address: str) -> Stream:
        return TlsStream(await self._network.connect(address), self._client, server_name=HOST)
