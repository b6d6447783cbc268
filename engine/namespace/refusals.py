"""Why a name cannot be looked up or changed, in words: the refusals that several decisions about names share."""

from __future__ import annotations

from engine.namespace.buckets import BucketRef
from engine.namespace.keys import subject_of
from lakefs.errors import (
    AlreadyExists,
    FolderNotEmpty,
    KeyDeleted,
    KeyNotFound,
    NotAFolder,
    VersionIsMarker,
)
from lakefs.names import shown


def subject(bucket: BucketRef, key: str) -> str:
    """A name as an error's subject."""
    return subject_of(bucket.name, key)


def shown_name(bucket: BucketRef, key: str) -> str:
    """A name as messages show it."""
    return shown(f"{bucket.name}/{key}")


def not_found(bucket: BucketRef, key: str) -> KeyNotFound:
    """Nothing has this name."""
    return KeyNotFound(
        f"{shown_name(bucket, key)} does not exist; see what does with: lake ls {bucket.name}/",
        subject=subject(bucket, key),
    )


def deleted(bucket: BucketRef, key: str) -> KeyDeleted:
    """A delete marker is on top of what the name was bound to."""
    return KeyDeleted(
        f"{shown_name(bucket, key)} is deleted; its bucket keeps versions, and may have some of it",
        subject=subject(bucket, key),
    )


def is_a_marker(bucket: BucketRef, key: str, version: str) -> VersionIsMarker:
    """The version has no content."""
    return VersionIsMarker(
        f"version {version[:64]} of {shown_name(bucket, key)} is a delete marker and has no content",
        subject=subject(bucket, key),
    )


def object_instead(bucket: BucketRef, key: str) -> NotAFolder:
    """A folder was meant, and something else has its name."""
    return NotAFolder(
        f"{shown_name(bucket, key.rstrip('/'))} is an object or symlink, not a folder",
        subject=subject(bucket, key),
    )


def already_there(bucket: BucketRef, key: str) -> AlreadyExists:
    """The name was to be new."""
    return AlreadyExists(f"{shown_name(bucket, key)} exists already", subject=subject(bucket, key))


def not_empty(bucket: BucketRef, key: str) -> FolderNotEmpty:
    """A folder was to be empty."""
    return FolderNotEmpty(
        f"folder {shown_name(bucket, key)} is not empty; remove or move what is in it first",
        subject=subject(bucket, key),
    )
