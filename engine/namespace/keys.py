"""Names and keys: the rules for accepting them, and the mapping from a key to keys of the table `names`.

A key is a path of steps from its bucket's node.  A step is a folder (`b"part/"`), or the first 480 bytes of a component
that has 480 bytes or more.  Those bytes name a hidden node that holds the rest (split again if need be).  The remainder
is the name under the last step; the name of a folder ends with `/`.

Rules kept here:
- Depth-first order of the table is the byte order of keys.
- A key of the table has at most 489 bytes, whatever the client sent: LMDB refuses more than 511.
- New names are checked; names that are looked up are not.  A key that a folder's rename made longer than the limit can
  still be read, moved and removed, and an impossible key simply does not exist.

Empty components, `.` and `..` are ordinary.  Nothing here reads or writes.
"""

from __future__ import annotations

from engine.format.layouts import node_key
from lakefs.errors import InvalidName
from lakefs.ids import NodeId
from lakefs.limits import COMPONENT_SPLIT_BYTES, KEY_BYTES_MAX
from lakefs.names import invalid_bucket_name, is_bucket_name, shown

Step = bytes
"""One name record on the way to a key: a folder, ending with `/`, or 480 bytes that name a hidden node."""
assert 8 + COMPONENT_SPLIT_BYTES + 1 <= 511, "a parent's id, a step and one more byte: LMDB refuses longer keys"


def check_bucket_name(name: str) -> bytes:
    """Return the name as bytes, for a look-up.  Raises InvalidName if no bucket can have that name."""
    if not is_bucket_name(name):
        raise invalid_bucket_name(name)
    return name.encode()


def check_key(key: str, bytes_max: int | None = KEY_BYTES_MAX) -> bytes:
    """Return the UTF-8 bytes of a new key.  Raises InvalidName with the rule that it breaks.

    Without `bytes_max` it may have any length: for keys that exist, and for the new ones of folders.
    """
    try:
        path = key.encode()
    except UnicodeEncodeError:
        raise InvalidName(
            f"key {shown(key)} is not valid Unicode text (it has a lone surrogate); use names in UTF-8",
            subject=shown(key),
        ) from None
    if not path or len(path) > (bytes_max or len(path)):
        raise InvalidName(
            f"key {shown(key)} has {len(path)} bytes in UTF-8; a key has 1 to {bytes_max or KEY_BYTES_MAX}",
            subject=shown(key),
        )
    if b"\0" in path:
        raise InvalidName(f"key {shown(key)} contains a NUL character; remove it", subject=shown(key))
    return path


def lookup_path(text: str) -> bytes:
    """Return the bytes of a key, prefix or position that is only looked up; never raises."""
    return text.encode("utf-8", "surrogatepass")


def subject_of(bucket: str, key: str) -> str:
    """Return a name as an error's subject: `bucket/key`, with anything that is not Unicode text replaced."""
    return f"{bucket}/{key}".encode("utf-8", "replace").decode()


def split_path(path: bytes) -> tuple[list[Step], bytes]:
    """Return the steps of a path, and the rest behind the last step: under 480 bytes, without `/`, possibly empty."""
    folders = path.split(b"/")
    rest = folders.pop()
    steps: list[Step] = []
    for component in folders:
        while len(component) >= COMPONENT_SPLIT_BYTES:
            steps.append(component[:COMPONENT_SPLIT_BYTES])
            component = component[COMPONENT_SPLIT_BYTES:]
        steps.append(component + b"/")
    while len(rest) >= COMPONENT_SPLIT_BYTES:
        steps.append(rest[:COMPONENT_SPLIT_BYTES])
        rest = rest[COMPONENT_SPLIT_BYTES:]
    assert len(rest) < COMPONENT_SPLIT_BYTES, "the rest fits under the last step"
    return steps, rest


def split_key(path: bytes) -> tuple[list[Step], bytes]:
    """Return the steps to the parent of a key (not empty), and its name there; a folder's name ends with `/`."""
    steps, name = split_path(path)
    if path.endswith(b"/"):
        return steps, steps.pop()
    return steps, name


def is_folder_step(step: Step) -> bool:
    """Return True if a step is a folder, False if it names a hidden node."""
    return step.endswith(b"/")


def name_key(parent: NodeId, name: bytes) -> bytes:
    """Return the key of a name in the table `names`."""
    return node_key(parent) + name


def behind(key: bytes) -> bytes:
    """Return the least key of the table behind `key`; names hold no NUL, so nothing lies between."""
    return key + b"\0"


def range_end(parent: NodeId, name_prefix: bytes) -> bytes:
    """Return the end of the names under `parent` that begin with `name_prefix`.  No byte of UTF-8 is 255."""
    if not name_prefix:
        return node_key(NodeId(parent + 1))
    return node_key(parent) + name_prefix[:-1] + bytes([name_prefix[-1] + 1])
