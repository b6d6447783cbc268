"""Messages for what only file systems know of names: two of them exchanged.  See `lakefs.wire.messages`."""

from __future__ import annotations

from lakefs.wire.base import NO_CONDITION, Condition, NameResults, Request


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
