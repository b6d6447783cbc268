"""Messages for what only file systems know: names exchanged, special nodes.  See `lakefs.wire.messages`."""

from __future__ import annotations

from typing import Final

from lakefs.wire.base import NO_CONDITION, Condition, NameResults, ObjectAttributes, Request

SPECIAL_KINDS: Final = {5: "pipe", 6: "socket", 7: "character device", 8: "block device"}
"""Kinds of special nodes in ObjectStat and ListEntry, and their names for people.  They have no content."""


class Exchange(Request, frozen=True):
    """Exchange two names of one bucket, atomically: each gets the other's node, a folder with all that is below it.

    Both must exist (KeyNotFound), neither below the other (InvalidArgument).  Where one is a folder, the final `/` of
    its key goes along; a new key that is taken is AlreadyExists.  The result is that of the node that had `key`, under
    its new key.  Conditions, `durable` and `folders` as in Rename.  Only for engines with FEATURE_EXCHANGE.
    """

    OP = 36
    REPLY = NameResults
    bucket: str
    key: str
    to_key: str
    durable: bool = True
    condition: Condition = NO_CONDITION
    to_condition: Condition = NO_CONDITION
    folders: bool = False


class MakeNode(Request, frozen=True):
    """Make a special node of one of SPECIAL_KINDS; AlreadyExists when an object, symlink or folder has the name.

    `device`: the number of a device, of 32 bits, as stat(2) shows it; 0 for pipes and sockets.  `durable` and `folders`
    as in Commit.  Only for engines with FEATURE_NODES.
    """

    OP = 37
    REPLY = NameResults
    bucket: str
    key: str
    kind: int
    attributes: ObjectAttributes
    device: int = 0
    durable: bool = True
    condition: Condition = NO_CONDITION
    folders: bool = False
