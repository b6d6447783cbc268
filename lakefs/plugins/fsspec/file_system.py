"""`LakeFileSystem`: `lake://BUCKET/KEY` for everything that opens files by fsspec.

    fsspec.filesystem("lake", server="unix:/run/lake/lake.sock")
    pandas.read_parquet("lake://tables/2026/a.parquet")

It is a synchronous file system over the blocking client; fsspec wraps it where an asynchronous one is wanted.
`lakefs.plugins.fsspec.writer` says when a written object becomes visible, `reader` which bytes a reader gets.

File systems of one thread are shared by the address of their engine.  A pickled one connects where it is unpickled, to
the same address, with the token of that environment: the pickle has no secret.  After a fork the child connects anew.
"""

from __future__ import annotations

import io
from typing import Any, Literal, cast

from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.spec import AbstractFileSystem

from lakefs.client.address import resolve
from lakefs.client.blocking.object_reader import ObjectReader
from lakefs.client.blocking.object_writer import WRITE_MODES, WriteMode
from lakefs.content.verify import Check, check_named
from lakefs.plugins.fsspec.connections import lake_of, next_connection
from lakefs.plugins.fsspec.contents import Contents
from lakefs.plugins.fsspec.os_errors import exists_already, is_a_folder, os_call
from lakefs.plugins.fsspec.reader import LakeReader
from lakefs.plugins.fsspec.writer import CompressedWriter, LakeWriter, TextWriter

_Cached: Any = type(AbstractFileSystem)


class _ByServer(_Cached):  # type: ignore[misc]
    """Makes the address of the engine one of the options, so that fsspec's cache tells engines apart."""

    def __call__(self, *args: Any, server: str | None = None, **options: Any) -> Any:
        address, _ = os_call(resolve, server, "")
        return super().__call__(*args, server=address, **options)


class LakeFileSystem(Contents, metaclass=_ByServer):
    """A lake as a file system.

    `server`: `unix:PATH` or `tcp://HOST:PORT`; default LAKE_SERVER, else the engine that `lakefs.connect` finds.
    `token`: for TCP; default LAKE_TOKEN.  `check`: "BLAKE3" (default), "CRC32C" or "NONE", the check of whole chunks
    that are read.  `timeout`: see `lakefs.connect`.  ConnectionRefusedError, PermissionError, OSError.
    """

    _strip_tokenize_options = ("token",)

    def __init__(
        self,
        *,
        server: str,
        token: str | None = None,
        check: Literal["BLAKE3", "CRC32C", "NONE"] | Check = "BLAKE3",
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        if self._cached:
            return
        super().__init__(**options)
        self._token = token
        self._connection = next_connection(server, os_call(check_named, check), timeout)
        os_call(lake_of, self._connection, token)  # a wrong address or token is an error at once

    @property
    def server(self) -> str:
        """The engine's address."""
        return self._connection.address

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open an object: `LakeReader` for "rb", `LakeWriter` for "wb", "xb" and "ab", text files over them for "r" ...

        `compression`: a name that fsspec knows, or "infer".  FileNotFoundError, IsADirectoryError, FileExistsError.
        """
        text = {name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs}
        if "b" not in mode:
            binary: Any = self.open(path, mode.replace("t", "") + "b", compression=compression, **kwargs)
            return (io.TextIOWrapper if "r" in mode else TextWriter)(binary, **text)
        autocommit = kwargs.pop("autocommit", not self._intrans)
        file = self._open(self._strip_protocol(path), mode, autocommit=autocommit)
        if isinstance(file, LakeWriter) and not autocommit:
            self.transaction.files.append(file)
        method = get_compression(path, compression)
        if method is None:
            return file
        made = compr[method](file, mode=mode[0])
        return CompressedWriter(made, file) if isinstance(file, LakeWriter) else made

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> LakeReader | LakeWriter:
        if mode == "rb":
            return self._open_reader(path)
        if mode not in WRITE_MODES:
            raise NotImplementedError(f"files of the lake are opened with rb, wb, xb or ab, not {mode!r}")
        if "/" not in path:
            raise is_a_folder(path)
        if mode == "xb" and self.exists(path):
            raise exists_already(path)
        return os_call(LakeWriter, self, path, self.lake, cast(WriteMode, mode), autocommit=autocommit)

    def _open_reader(self, path: str) -> LakeReader:
        try:
            if "/" not in path:
                raise is_a_folder(path)
            source = cast(ObjectReader, os_call(self.lake.open, path).detach())
        except FileNotFoundError as error:
            raise self._clearer(path, error) from error.__cause__
        return LakeReader(self, path, source)
