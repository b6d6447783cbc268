"""Messages between a head of a lake and its names: names bound to blobs that the head has stored over members.

Names cannot look at content.  A head has, and says so: each blob with its size and chunk count, and the gc generation
and ring epoch in which members answered that its chunks are stored.  Only heads may send these requests: names believe
them.  See `lakefs.wire.messages`.
"""

from __future__ import annotations

from lakefs.wire.base import Message, NameChange, NameResults, Request
from lakefs.wire.upload_messages import PartStat, UploadComplete, UploadPut


class Answered(Message, frozen=True):
    """When members answered that chunks are stored: the oldest gc generation and ring epoch of these answers."""

    generation: int
    epoch: int


class BindBlobs(Request, frozen=True):
    """Bind names to blobs, as Commit and PutObjects do; `sizes` and `chunk_counts` are those of the changes' blobs.

    SessionLost, and nothing is bound, if the answers are too old: see AnswersAccepted.  `durable` and `folders` as in
    Commit.
    """

    OP = 110
    REPLY = NameResults
    answered: Answered
    changes: list[NameChange]
    sizes: list[int]
    chunk_counts: list[int]
    durable: bool = True
    folders: bool = False


class BindPart(Request, frozen=True):
    """Bind a part of an upload to its blob; the session of `put` is not looked at.  SessionLost as in BindBlobs."""

    OP = 111
    REPLY = PartStat
    answered: Answered
    put: UploadPut
    size_bytes: int
    chunk_count: int


class BindUpload(Request, frozen=True):
    """Complete an upload with its blob; the session of `complete` is not looked at.  SessionLost as in BindBlobs.

    `chunk_count` 0: the head does not have the blob.  Then only the answer of an upload that was completed already is
    given again; SessionLost if it was not.
    """

    OP = 112
    REPLY = NameResults
    answered: Answered
    complete: UploadComplete
    size_bytes: int
    chunk_count: int


class AnswersAccepted(Message, frozen=True):
    """Names are bound on answers of the gc generation before `generation`, or later; and of `epoch` or later.

    `generation` is the one that the names have joined, `epoch` the oldest ring epoch that is not retired.
    """

    generation: int
    epoch: int


class AcceptedAnswers(Request, frozen=True):
    """Ask which answers of members names are bound on now."""

    OP = 113
    REPLY = AnswersAccepted


class BindCopy(Request, frozen=True):
    """Bind a name to what a name in another names shard has, as Copy does within one; its errors are those of Copy.

    `change` has the blob and all attributes that the copy gets.  Times of 0 mean now.  `symlink_target`, if it is not
    empty: the copy is a symlink, and `change.blob` is empty; so it is with `special`, the kind of a special node, and
    its `device`.  SessionLost as in BindBlobs.
    """

    OP = 114
    REPLY = NameResults
    answered: Answered
    change: NameChange
    size_bytes: int
    chunk_count: int
    symlink_target: bytes = b""
    special: int = 0
    device: int = 0
