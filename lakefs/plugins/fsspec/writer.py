"""`LakeWriter`: an object opened for writing by fsspec: an `ObjectWriter` whose errors are OSError.

In a transaction of fsspec a closed file waits, stored but not visible, for `commit()` or `discard()`.
"""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING, Any

from lakefs.client.blocking.object_writer import ObjectWriter, WriteMode
from lakefs.client.facade import driver_of
from lakefs.errors import AlreadyExists, LakeError
from lakefs.names import parse_new_name
from lakefs.plugins.fsspec.os_errors import exists_already, os_error
from lakefs.steps.steps import Steps

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake
    from lakefs.plugins.fsspec.look_ups import LookUps


class LakeWriter(ObjectWriter):
    """An object opened by `LakeFileSystem.open(path, "wb")`, `"xb"` (it must not exist) or `"ab"` (append)."""

    def __init__(self, fs: LookUps, path: str, lake: Lake, mode: WriteMode, *, autocommit: bool) -> None:
        self.fs = fs
        self.path = path
        self.autocommit = autocommit
        super().__init__(driver_of(lake), parse_new_name(path), mode)

    @property
    def full_name(self) -> str:
        """The path with `lake://`."""
        return str(self.fs.unstrip_protocol(self.path))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        raise OSError(errno.ESPIPE, "an object that is written cannot be sought in", self.path)

    def commit(self) -> None:
        """Make a file that was closed in a transaction visible, whole and durable."""
        if not self._is_done:
            self._commit()
            io.BufferedIOBase.close(self)

    def _finish(self) -> None:
        if self.autocommit:
            self._commit()
        elif self._gathered or self._is_stored:
            self._store_gathered()

    def _run(self, steps: Steps[Any]) -> Any:
        try:
            return super()._run(steps)
        except AlreadyExists as error:
            raise exists_already(self.path) from error.__cause__
        except LakeError as error:
            raise os_error(error) from error


class TextWriter(io.TextIOWrapper):
    """A text file over a `LakeWriter`: dropped, as that is, when an error leaves its `with` block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()


class CompressedWriter(io.BufferedIOBase):
    """A compressor over a `LakeWriter`, closed together."""

    def __init__(self, compressor: Any, target: LakeWriter) -> None:
        self._compressor = compressor
        self._is_ended = False
        self._target = target

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Compress bytes and add them to the object."""
        count: int = self._compressor.write(data)
        return count

    def flush(self) -> None:
        """Add what the compressor holds back, if it can do that."""
        if not self._is_ended:
            self._compressor.flush()

    def tell(self) -> int:
        position: int = self._compressor.tell()
        return position

    def close(self) -> None:
        """End the compressed content, and close the object."""
        if not self._is_ended:
            self._is_ended = True
            try:
                self._compressor.close()
                self._target.close()
            except BaseException:
                self._target.discard()
                raise
            finally:
                super().close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()
