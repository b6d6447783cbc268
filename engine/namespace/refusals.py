"""Errors shared by several decisions about names: each function returns one, with its message."""

from __future__ import annotations

from engine.namespace.buckets import BucketRef
from engine.namespace.keys import subject_of
from lakefs.errors import AlreadyExists, FolderNotEmpty, KeyDeleted, KeyNotFound, NotAFolder, VersionIsMarker
from lakefs.names import shown


def subject(bucket: BucketRef, key: str) -> str:
    """Return a name as an error's subject."""
    return subject_of(bucket.name, key)


def shown_name(bucket: BucketRef, key: str) -> str:
    """Return a name as messages show it."""
    return shown(f"{bucket.name}/{key}")


def not_found(bucket: BucketRef, key: str) -> KeyNotFound:
    """The name does not exist."""
    return KeyNotFound(
        f"{shown_name(bucket, key)} does not exist; see what does with: lake ls {bucket.name}/",
        subject=subject(bucket, key),
    )


def deleted(bucket: BucketRef, key: str) -> KeyDeleted:
    """The name's newest version is a delete marker."""
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
    """A folder was expected, but an object or symlink has the name."""
    return NotAFolder(
        f"{shown_name(bucket, key.rstrip('/'))} is an object or symlink, not a folder", subject=subject(bucket, key)
    )


def already_there(bucket: BucketRef, key: str) -> AlreadyExists:
    """A new name was expected, but it exists."""
    return AlreadyExists(f"{shown_name(bucket, key)} exists already", subject=subject(bucket, key))


def not_empty(bucket: BucketRef, key: str) -> FolderNotEmpty:
    """An empty folder was expected."""
    return FolderNotEmpty(
        f"folder {shown_name(bucket, key)} is not empty; remove or move what is in it first",
        subject=subject(bucket, key),
    )
