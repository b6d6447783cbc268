"""A caller's buffer as plain bytes.

A buffer may hold references to Python objects: a numpy array of dtype `object`, or a structure with such a field.
Bytes read into it are taken for addresses, and the process dies; bytes stored from it are addresses of this process.
So each buffer of a caller passes here before its bytes are used.
"""

from __future__ import annotations

import re
from typing import Any, Final

from lakefs.errors import InvalidArgument
from lakefs.host.arrays import array_bytes

_FIELD_NAMES: Final = re.compile(":[^:]*:")
_OBJECT: Final = "O"  # PEP 3118: a pointer to a Python object


def plain_bytes(lent: Any) -> memoryview:
    """Return the memory of a buffer as bytes, one dimension; read-only if the buffer is.

    TypeError, whose text begins with a verb: it lends no memory, is not contiguous, or holds Python objects.
    """
    try:
        view = memoryview(lent)
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(f"lends no memory ({error})") from error
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if _OBJECT in _FIELD_NAMES.sub("", view.format):
        raise TypeError(f"holds Python objects (format {view.format!r}), not bytes")
    if not view.c_contiguous:
        raise TypeError("is not contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"" if view.readonly else bytearray())


def bytes_to_put(data: Any, subject: str = "", others: str = "") -> memoryview:
    """Return the memory of a buffer, array or tensor that is to be stored, in the order of its elements.

    `subject` is its name or key; `others` says what its caller takes beside memory.  InvalidArgument.
    """
    kind, target = type(data).__name__, f" as {subject}" if subject else ""
    try:
        try:
            return plain_bytes(data)
        except TypeError:
            found = array_bytes(data)  # its reason is the better one, if it is an array
            if found is not None:
                return found
            if not _is_buffer(data):
                raise InvalidArgument(
                    f"cannot put a {kind}{target}; pass bytes, an array or a tensor{others}", subject=subject
                ) from None
            raise
    except TypeError as error:
        raise InvalidArgument(f"the {kind} to store{target} {error}", subject=subject) from error


def _is_buffer(data: Any) -> bool:
    try:
        memoryview(data).release()
    except TypeError:
        return False
    except (ValueError, BufferError):
        return True
    return True
